"""llama.cpp as a child of perf.peers: needs the package xllamacpp and nothing of this project.

    python perf/peer_llama.py MODEL.gguf SLOTS TOKENS_A_SLOT THREADS

Memory-mapped, one slot a request, continuous batching, no prompt cache. Takes a job a line,
{"prompts": [[ids]], "new": N}, and answers in one: seconds, when tokens came, texts.
"""

import json
import sys
import threading
import time

import xllamacpp as xlc


def main():
    model, slots, each, threads = sys.argv[1], *map(int, sys.argv[2:5])
    params = xlc.CommonParams()
    params.model.path = model
    params.n_parallel = slots
    params.n_ctx = slots * each
    params.n_batch = params.n_ubatch = 512
    params.load_mode = xlc.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.warmup = False
    params.fit_params = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xlc.Server(params)
    version = xlc.__version__ if hasattr(xlc, "__version__") else "unknown"
    answer({"ready": True, "version": version, "system": xlc.get_system_info()})
    for line in sys.stdin:
        job = json.loads(line)
        answer(run(server, job["prompts"], job["new"]))


def answer(document):
    sys.__stdout__.write(json.dumps(document) + "\n")
    sys.__stdout__.flush()


def run(server, prompts, new):
    times = [[] for _ in prompts]
    texts = [[] for _ in prompts]
    errors = []

    def one(n):
        def came(chunk):
            if isinstance(chunk, (str, bytes)):
                chunk = json.loads(chunk)
            for part in chunk if isinstance(chunk, list) else [chunk]:
                if part.get("error"):
                    errors.append(str(part["error"]))
                for choice in part.get("choices", []):
                    if choice.get("text"):
                        times[n].append(time.perf_counter() - began)
                        texts[n].append(choice["text"])

        server.handle_completions({
            "prompt": prompts[n], "max_tokens": new, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "stream": True,
        }, came)

    began = time.perf_counter()
    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - began, "token_s": times,
            "texts": ["".join(text) for text in texts], "errors": errors}


if __name__ == "__main__":
    main()
