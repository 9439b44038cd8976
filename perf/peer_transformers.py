"""transformers with accelerate as a child of perf.peers: needs torch, transformers, accelerate.

    python perf/peer_transformers.py MODEL CPU_BYTES OFFLOAD_FOLDER THREADS

What does not fit into CPU_BYTES is on the disk and read when its module runs. All requests are one
batch. The same protocol as perf/peer_llama.py; it tells no time for single tokens.
"""

import json
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM


def main():
    model, cpu_bytes, folder, threads = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    where = {"device_map": "auto", "max_memory": {"cpu": cpu_bytes}, "offload_folder": folder}
    if cpu_bytes < 0:
        where = {}
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **where)
    net.generation_config.eos_token_id = None
    places = {}
    for place in getattr(net, "hf_device_map", {}).values():
        places[str(place)] = places.get(str(place), 0) + 1
    answer({"ready": True, "version": f"{transformers.__version__}, torch {torch.__version__}",
            "system": f"modules by place: {places or 'all in memory'}"})
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        began = time.perf_counter()
        with torch.inference_mode():
            out = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                               max_new_tokens=job["new"], min_new_tokens=job["new"],
                               pad_token_id=0)
        seconds = time.perf_counter() - began
        texts = ["".join(f" w{t}." for t in row) for row in out[:, ids.shape[1]:].tolist()]
        answer({"seconds": seconds, "token_s": [], "texts": texts, "errors": []})


def answer(document):
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
