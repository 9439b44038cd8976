/* Control by itself, written from specs/control.md alone: decoding requests in visit mode,
   interleaved, least progress first, per-layer eviction, one channel, one row a visit.

   It shares nothing with reference/control or with the explorer in oracle/. Both are run on the
   same scopes; property_tests/test_spin.py compares verdicts, numbers of states, and the states.

   A state holds what the rules need and nothing else: no slot numbers, no tickets, no numbers of
   requests, no scratch. A transition is what the explorer takes for one: an event and the ask that
   follows, in one atomic sequence; with BATCH events and asks are transitions of their own. So
   Spin stores a state exactly where the explorer does. Every transition prints the state that it
   led to (compile with -DPRINTF), in the form that the test gives the explorer's states too.

   Given by the scope, as -D:  N requests of one prompt token, SHAPES the tokens that each makes,
   L layers, E experts, K experts a token, S slots, RETRIES, FAULTS failed loads, UNDRAINED (1: also
   undrained), CANCELS, BATCH.  L * E <= 8, so that a set of experts is a byte.
   SEED: 1 claims keep nothing in its slot; 2 there are no claims; 0 neither. */

#ifndef SEED
#define SEED 0
#endif
#define NONE 0          /* an empty place in a list */
#define QUEUED 1
#define WAITING 2
#define RUNNING 3
#define CODES (L * E)
#define SHARE ((S) / (L) > 0 -> (S) / (L) : 1)
#define ENDLESS 99
#define LOWEST ((1 << K) - 1)
#define HIGHEST (((1 << K) - 1) << (E - K))

#define BIT(c) (1 << (c))
#define BITS(x) (((x) & 1) + ((x) >> 1 & 1) + ((x) >> 2 & 1) + ((x) >> 3 & 1) \
               + ((x) >> 4 & 1) + ((x) >> 5 & 1) + ((x) >> 6 & 1) + ((x) >> 7 & 1))
/* SCHED-6: all enter their class together, so progress is the visits ended. */
#define PROGRESS(i) (tokens[i] * (L + 1) + stage[i])
#define LACKS(i) (need[i] & ~(present | coming | owed))
#define OPEN(i) (phase[i] == WAITING && need[i] && !claimed[i])
#define OVER (asked && live == 0 && flying == 0)

/* Requests that have not ended, in order of arrival (ADMIT-1). stage 0 is ENTRY. */
byte live = N;
byte shape[N] = SHAPES;
byte phase[N] = QUEUED;
byte tokens[N];
byte stage[N];
byte need[N];           /* named by the visit; while it runs: what the step reads */
bool claimed[N];
bool quits[N];          /* CANCEL-1: ends with its step */
byte untold;            /* ended, and not asked since */

/* Experts are code + 1. Resident ones by layer, least recently used first (CACHE-5). */
byte resident[L * S];
byte count[L];
/* Transfers in order of issue; a late one has failed and its slot is in quarantine (CACHE-9). */
byte flight[S];
bool late[S];
byte flying;
byte promised[S];       /* claimed, to be read, in order (CACHE-3) */
byte owing;
byte failures[L * E];   /* in a row (FETCH-6) */
byte faults = FAULTS;
byte cancels = CANCELS;
bool asked;

/* Drawn before a transition, nothing between transitions. */
byte pick[N];
byte tie_visit, tie_layer, at;

/* Scratch inside one d_step. */
hidden byte present, coming, owed, held, reading, lacking, wants;
hidden int a, b, c, d, n, best, found, layer, way;
hidden byte blocked, channel, step;

/* -- sets that follow from the state */

inline look() {
  present = 0; coming = 0; owed = 0; held = 0; reading = 0;
  channel = 1; step = 0;
  for (a : 0 .. L - 1) { for (b : 0 .. count[a] - 1) {
    present = present | BIT(resident[a * S + b] - 1) } }
  for (a : 0 .. flying - 1) {
    if
    :: late[a]
    :: else -> coming = coming | BIT(flight[a] - 1); channel = 0
    fi }
  for (a : 0 .. owing - 1) { owed = owed | BIT(promised[a] - 1) }
  for (a : 0 .. live - 1) {
    if
    :: phase[a] == RUNNING -> step = 1; reading = reading | need[a]
    :: claimed[a] && SEED == 0 -> held = held | need[a]
    :: else
    fi }
}

/* n: how many waiting visits have named code c */
inline count_waiters(code) {
  n = 0;
  for (b : 0 .. live - 1) {
    if
    :: phase[b] == WAITING && (need[b] & BIT(code)) -> n++
    :: else
    fi }
}

/* -- the end of a request: everything it held is free (CANCEL-1) */

inline forget(i) {
  phase[i] = NONE; untold = untold + (BATCH -> 1 : 0)
}

inline close_ranks() {
  n = 0;
  for (a : 0 .. live - 1) {
    if
    :: phase[a] != NONE ->
       shape[n] = shape[a]; phase[n] = phase[a]; tokens[n] = tokens[a]; stage[n] = stage[a];
       need[n] = need[a]; claimed[n] = claimed[a]; quits[n] = quits[a]; n++
    :: else
    fi }
  for (a : n .. live - 1) {
    shape[a] = 0; phase[a] = NONE; tokens[a] = 0; stage[a] = 0; need[a] = 0; claimed[a] = 0;
    quits[a] = 0 }
  live = n;
  /* Promises of claims that are gone, and counts that nobody waits for, are gone too. */
  wants = 0; held = 0;
  for (a : 0 .. live - 1) {
    if
    :: phase[a] == WAITING -> wants = wants | need[a]
    :: else
    fi;
    if
    :: claimed[a] || (SEED == 2 && phase[a] == WAITING) -> held = held | need[a]
    :: else
    fi }
  n = 0;
  for (a : 0 .. owing - 1) {
    if
    :: held & BIT(promised[a] - 1) -> promised[n] = promised[a]; n++
    :: else
    fi }
  for (a : n .. owing - 1) { promised[a] = NONE }
  owing = n;
  for (a : 0 .. CODES - 1) {
    if
    :: wants & BIT(a)
    :: else -> failures[a] = 0
    fi }
}

/* -- what is read next */

/* way: how urgent it is to read for visit i (FETCH-1): the least progress, then the most waiters
   helped, summed over what it lacks */
inline urgency(i) {
  way = 0;
  for (c : 0 .. CODES - 1) {
    if
    :: LACKS(i) & BIT(c) -> count_waiters(c); way = way + n
    :: else
    fi }
  way = 1000 * (ENDLESS - PROGRESS(i)) + way
}

/* found: the most urgent visit that lacks something, or ENDLESS; equals go by arrival, or, for the
   sake of exploring, in any order: tie_visit says which of them */
inline whose_turn() {
  best = -1; d = 0; found = ENDLESS;
  for (a : 0 .. live - 1) {
    if
    :: OPEN(a) && LACKS(a) ->
       urgency(a);
       if
       :: way > best -> best = way; d = 1
       :: way == best -> d++
       :: else
       fi
    :: else
    fi }
  d = (d > 0 -> tie_visit % d : 0);
  for (a : 0 .. live - 1) {
    if
    :: best >= 0 && OPEN(a) && LACKS(a) ->
       urgency(a);
       if
       :: way == best && d == 0 -> found = a; d = -1
       :: way == best && d > 0 -> d--
       :: else
       fi
    :: else
    fi }
}

/* CACHE-3: all of its experts or none; what is missing is promised slots in ascending order.
   All that is kept and all that is promised must fit beside the transfers (blocked: it does not) */
inline claim(i) {
  lacking = LACKS(i);
  blocked = (S - flying - BITS(present & (held | reading | (SEED == 0 -> need[i] : 0)))
             < owing + BITS(lacking));
  if
  :: blocked
  :: else ->
     claimed[i] = (SEED != 2);
     held = held | (SEED == 0 -> need[i] : 0);
     for (c : 0 .. CODES - 1) {
       if
       :: lacking & BIT(c) -> promised[owing] = c + 1; owing++; owed = owed | BIT(c)
       :: else
       fi }
  fi
}

/* found: place in `resident` of the one to overwrite, or ENDLESS. CACHE-5: the layers in turn, the
   newcomer's own first once it has its share, then by what they hold; CACHE-6: in all of them
   before one that is wanted. */
inline victim(code) {
  found = ENDLESS; best = ENDLESS; wants = 0; d = 0;
  for (a : 0 .. live - 1) {
    if
    :: phase[a] == WAITING -> wants = wants | need[a]
    :: else
    fi }
  for (way : 0 .. L - 1) {
    layer = ENDLESS; n = -1;
    for (a : 0 .. L - 1) {
      c = count[a] + BITS(coming & (((1 << E) - 1) << (a * E)));
      c = (a == (code) / E && c >= SHARE -> ENDLESS : c);
      if
      :: !(d & BIT(a)) && c > n -> n = c; layer = a
      :: else
      fi }
    d = d | BIT(layer);
    for (b : 0 .. count[layer] - 1) {
      c = resident[layer * S + b] - 1;
      if
      :: (held | reading) & BIT(c)
      :: else ->
         if
         :: found == ENDLESS && !(wants & BIT(c)) -> found = layer * S + b
         :: else
         fi;
         if
         :: best == ENDLESS -> best = layer * S + b
         :: else
         fi
      fi } }
  found = (found == ENDLESS -> best : found)
}

/* remove place p from the residents */
inline take_out(p) {
  layer = (p) / S;
  for (b : (p) - layer * S .. count[layer] - 2) {
    resident[layer * S + b] = resident[layer * S + b + 1] }
  count[layer]--;
  resident[layer * S + count[layer]] = NONE
}

inline read_next() {
  way = 0;
  for (a : 0 .. L - 1) { way = way + count[a] }
  if
  :: way + flying < S -> found = 0
  :: else ->
     victim(promised[0] - 1);
     if
     :: found < ENDLESS ->
        c = resident[found] - 1;
        assert(!(BIT(c) & (held | reading)));                    /* S6 */
        present = present & ~BIT(c);
        take_out(found)
     :: else
     fi
  fi;
  if
  :: found < ENDLESS ->
     c = promised[0] - 1;
     assert(!(BIT(c) & (present | coming)));                     /* S5 */
     flight[flying] = c + 1; flying++; coming = coming | BIT(c);
     owed = owed & ~BIT(c);
     for (a : 0 .. owing - 2) { promised[a] = promised[a + 1] }
     owing--; promised[owing] = NONE;
     way = flying;
     for (a : 0 .. L - 1) { way = way + count[a] }
     assert(way <= S)                                            /* S3, S7 */
  :: else
  fi
}

/* A visit that lacks something claims when the channel is idle and nothing promised waits for it;
   who finds no room stops the others (SCHED-8). Who lacks nothing claims at once (SCHED-2). */
inline fetch() {
  blocked = 0;
  if
  :: channel ->
     if
     :: owing == 0 ->
        whose_turn();
        if
        :: found < ENDLESS -> claim(found)
        :: else
        fi
     :: else
     fi;
     if
     :: owing > 0 -> read_next()
     :: else
     fi
  :: else
  fi;
  if
  :: !blocked ->
     for (d : 0 .. ENDLESS - 1) { for (a : 0 .. live - 1) {
       if
       :: OPEN(a) && PROGRESS(a) == d && !LACKS(a) -> claim(a)
       :: else
       fi } }
  :: else
  fi
}

/* -- what is run next */

#define READY(i) (phase[i] == WAITING \
  && (stage[i] == 0 || ((claimed[i] || SEED == 2) && !(need[i] & ~present))))

/* SCHED-4: the layer of the least advanced; all who are ready there. What they read becomes the
   most recent, in the order of the parts (least advanced first), ascending within one. */
inline start_step() {
  best = ENDLESS; n = 0; way = 0;
  for (a : 0 .. live - 1) {
    if
    :: READY(a) && PROGRESS(a) < best -> best = PROGRESS(a); n = 1; way = BIT(stage[a])
    :: READY(a) && PROGRESS(a) == best && !(way & BIT(stage[a])) ->
       n++; way = way | BIT(stage[a])
    :: else
    fi }
  if
  :: n > 0 ->
     n = tie_layer % n; layer = ENDLESS; d = 0;
     for (a : 0 .. live - 1) {
       if
       :: READY(a) && PROGRESS(a) == best && !(d & BIT(stage[a])) ->
          d = d | BIT(stage[a]);
          layer = (n == 0 -> stage[a] : layer);
          n--
       :: else
       fi }
     way = layer; reading = 0;
     for (d : best .. ENDLESS - 1) { for (a : 0 .. live - 1) {
       if
       :: READY(a) && stage[a] == way && PROGRESS(a) == d ->
          phase[a] = RUNNING; claimed[a] = 0;
          for (c : 0 .. CODES - 1) {
            if
            :: (need[a] & BIT(c)) && !(reading & BIT(c)) -> use(c)
            :: else
            fi }
       :: else
       fi } }
  :: else
  fi
}

inline use(code) {
  assert(present & BIT(code));                                   /* S9 */
  reading = reading | BIT(code);
  n = ENDLESS;
  for (b : 0 .. count[(code) / E] - 1) {
    if
    :: resident[((code) / E) * S + b] == (code) + 1 -> n = ((code) / E) * S + b
    :: else
    fi }
  take_out(n);
  resident[layer * S + count[layer]] = (code) + 1;
  count[layer]++
}

/* -- one ask: admit, read, claim, run */

inline ask() {
  asked = 1; untold = 0;
  for (a : 0 .. live - 1) {
    phase[a] = (phase[a] == QUEUED -> WAITING : phase[a]) }
  look();
  fetch();
  if
  :: !step -> start_step()
  :: else
  fi
}

inline settle() {
  close_ranks();
  asked = 0;
  if
  :: BATCH
  :: else -> ask()
  fi;
  tell()
}

/* -- events */

/* The transfer at place p of `flight` is heard of for the last time. */
inline drop_flight(p) {
  for (a : (p) .. flying - 2) { flight[a] = flight[a + 1]; late[a] = late[a + 1] }
  flying--;
  flight[flying] = NONE; late[flying] = 0
}

inline loaded(p) {
  c = flight[p] - 1;
  if
  :: late[p]
  :: else ->
     failures[c] = 0;
     resident[(c / E) * S + count[c / E]] = c + 1;
     count[c / E]++
  fi;
  drop_flight(p)
}

inline load_failed(p, is_late) {
  c = flight[p] - 1;
  faults--;
  if
  :: is_late -> late[p] = 1; flight[p] = NONE
  :: else -> drop_flight(p)
  fi;
  look();
  count_waiters(c);
  if
  :: failures[c] < RETRIES && n > 0 ->
     failures[c]++;
     if
     :: (held & BIT(c)) || (SEED == 2) ->                        /* the retry goes first */
        for (a : 1 .. owing) { promised[owing - a + 1] = promised[owing - a] }
        promised[0] = c + 1; owing++
     :: else
     fi
  :: failures[c] >= RETRIES ->                                   /* FETCH-6: it is lost */
     failures[c] = 0;
     for (a : 0 .. live - 1) {
       if
       :: phase[a] == WAITING && (need[a] & BIT(c)) -> forget(a)
       :: else
       fi }
  :: else
  fi
}

/* The step ends, and each of its visits: on to the next router, or a token (SCHED-1, SCHED-11). */
inline computed() {
  for (a : 0 .. live - 1) {
    if
    :: phase[a] != RUNNING
    :: phase[a] == RUNNING && quits[a] -> forget(a)
    :: phase[a] == RUNNING && !quits[a] && stage[a] < L ->
       need[a] = pick[a] << (stage[a] * E); stage[a]++; phase[a] = WAITING
    :: else ->
       tokens[a]++; stage[a] = 0; need[a] = 0; phase[a] = WAITING;
       if
       :: tokens[a] == shape[a] -> forget(a)
       :: else
       fi
    fi;
    pick[a] = 0 }
}

inline cancel(i) {
  cancels--;
  if
  :: phase[i] == RUNNING -> quits[i] = 1
  :: else -> forget(i)
  fi
}

/* -- draws */

inline draw_ties() {
  do
  :: tie_visit < live - 1 -> tie_visit++
  :: break
  od;
  do
  :: tie_layer < live - 1 -> tie_layer++
  :: break
  od;
  true
}

inline draw_routes() {
  do
  :: at == live -> break
  :: at < live && phase[at] == RUNNING && !quits[at] && stage[at] < L ->
     pick[at] = LOWEST;
     do
     :: pick[at] < HIGHEST -> pick[at]++
     :: BITS(pick[at]) == K -> break
     od;
     at++
  :: else -> at++
  od;
  at = 0
}

inline draw_place(most) {
  do
  :: at + 1 < most -> at++
  :: break
  od
}

inline undraw() { at = 0; tie_visit = 0; tie_layer = 0 }

inline tell() {
  undraw();
  printf("S %d %d %d %d", asked, faults, cancels, untold);
  for (a : 0 .. live - 1) {
    printf(" r %d %d %d %d %d %d %d", shape[a], phase[a], tokens[a], stage[a], need[a],
           claimed[a], quits[a]) }
  for (a : 0 .. L - 1) {
    printf(" c");
    for (b : 0 .. count[a] - 1) { printf(" %d", resident[a * S + b] - 1) } }
  printf(" t");
  for (a : 0 .. flying - 1) { printf(" %d", flight[a] - 1) }
  printf(" p");
  for (a : 0 .. owing - 1) { printf(" %d", promised[a] - 1) }
  printf(" f");
  for (a : 0 .. CODES - 1) { printf(" %d", failures[a]) }
  printf("\n")
}

/* N <= 3 */
#define STEPPING (phase[0] == RUNNING || phase[N / 2] == RUNNING || phase[N - 1] == RUNNING)

active proctype control() {
  do
  :: atomic { !asked -> draw_ties(); d_step { ask(); tell() };
       if :: OVER -> goto finished :: else fi }
  :: atomic { flying > 0 -> draw_place(flying); draw_ties();
       d_step { loaded(at); settle() };
       if :: OVER -> goto finished :: else fi }
  :: atomic { flying > 0 && faults > 0 -> draw_place(flying); draw_ties();
       if
       :: late[at] -> d_step { loaded(at); settle() }
       :: !late[at] -> d_step { load_failed(at, false); settle() }
       :: !late[at] && UNDRAINED -> d_step { load_failed(at, true); settle() }
       fi;
       if :: OVER -> goto finished :: else fi }
  :: atomic { STEPPING -> draw_routes(); draw_ties();
       d_step { computed(); settle() };
       if :: OVER -> goto finished :: else fi }
  :: atomic { cancels > 0 && live > 0 -> draw_place(live); draw_ties();
       d_step { cancel(at); settle() };
       if :: OVER -> goto finished :: else fi }
  :: atomic { cancels > 0 && untold > 0 -> d_step { cancels--; asked = 0; tell() } }
  od;
finished:
end_all_have_ended:
  false
}
