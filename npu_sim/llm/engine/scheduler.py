"""`Scheduler`: plans each step: which tokens of which sequences it computes, and the KV blocks that these need.

A step takes the next token of each running sequence first, then pieces of prompts, up to a maximum number of tokens: a
long prompt stalls neither the sequences that decode nor short prompts that come after it. A waiting sequence is
admitted when its prompt's blocks are free; the tenant with the fewest running sequences goes first. Where a running
sequence needs a block and none is left, the sequence that arrived last is preempted: it loses its blocks and waits
again. Its tokens are computed again, except those whose blocks are still cached.

Invariants:
1. `computed` tokens of a sequence are in the pool as soon as the launched steps have run; the device runs steps and
   copies in the order of their launches, so a block may be given to another sequence while such steps are under way.
2. A sequence writes rows from `computed` on only. The blocks of these rows are its own and not registered (blocks.py,
   invariant 2). Where a model's `piece` begins earlier, `computed` goes back to its start: the rows are overwritten
   with the values that they already have.
3. A sequence with an output whose token is not known yet is in the latest launched step, and gets no draft.
4. As many sequences run as one step can hold, so every running sequence that can take its next token takes it.
5. Each sequence fits into the pool alone, takes blocks only from sequences that arrived later, and waits where these
   are already part of the step; nothing is admitted meanwhile. So the earliest running sequence ends, then the next,
   and in the end all of them.
6. A running sequence has a slot of its own, with its recurrent states. A sequence that is admitted again computes them
   from its first token.
7. A block that is released before its sequence ends lies behind the window of every token that is still to be computed.
"""

import bisect
import heapq
from collections import Counter

import numpy as np

from npu_compiler.errors import InputError
from npu_sim.llm.engine.batch import NO_DRAFTS, BatchModel
from npu_sim.llm.engine.blocks import BlockPool
from npu_sim.llm.engine.planned_step import Choice, PlannedStep
from npu_sim.llm.engine.sequence import GREEDY, Sequence
from npu_sim.llm.engine.step_times import StepTimes
from npu_sim.llm.speculation.lookup import Drafter
from npu_sim.llm.speculation.planner import Speculation


class Scheduler:
    """Plans the steps of a model. It neither runs them nor waits for them.

    Args:
        prefill_tokens: Maximum number of prompt tokens of a step. None: as many as delay the other sequences little by
            the measured `times`, or as many as the model takes where no running sequence waits for a token.
        drafter: Guesses next tokens, which a step then verifies. None: there is no speculative decoding.

    Raises:
        InputError: there is a drafter, but the model cannot take back tokens.

    Attributes:
        running: Running sequences, in order of arrival.
        waiting: Number of sequences that wait.
        times: Measured durations of steps by their size.
        admitted: Sequences that were admitted for the first time; the caller empties it.
        preemptions: Number of times that a sequence lost its blocks.
    """

    def __init__(self, model: BatchModel, prefill_tokens: int | None = None, drafter: Drafter | None = None) -> None:
        if drafter is not None and not model.rewinds:
            raise InputError(NO_DRAFTS)
        self._model = model
        self._block_size = model.block_size
        self._max_tokens, self._max_outputs = model.max_tokens, model.max_outputs
        self._prefill_tokens = prefill_tokens
        self.times = StepTimes()
        self._speculation = None if drafter is None else Speculation(drafter, model.runs_ahead)
        self.max_running = min(model.max_sequences, model.max_outputs, model.max_tokens)
        self.max_rows = min(model.context_length, model.blocks * model.block_size)
        self.pool = BlockPool(model.blocks)
        self._tables = np.zeros((self.max_running, -(-self.max_rows // model.block_size)), np.int32)
        self._settings = np.zeros((self.max_running + 1, 3), np.float32)
        self._settings[-1] = GREEDY
        self._slots = list(range(self.max_running - 1, -1, -1))
        self.running: list[Sequence] = []
        self._waiting: dict[str, list[tuple[int, Sequence]]] = {}  # by tenant, heaps by arrival
        self._running_of: Counter[str] = Counter()
        self.waiting = 0
        self.admitted: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence, computed: int = 0) -> None:
        """Put a sequence into the queue of those that wait for admission.

        Args:
            computed: Number of its first tokens whose keys and values are still in the pool; above 0 only for a pool of
                a single block.
        """
        sequence.computed = computed
        heapq.heappush(self._waiting.setdefault(sequence.tenant, []), (sequence.arrival, sequence))
        self.waiting += 1

    def end(self, sequence: Sequence) -> None:
        """End a sequence, running or waiting: take it out and release its blocks, its slot and its drafter's data."""
        if not sequence.ended:
            sequence.ended = True
            self.remove(sequence)
            if self._speculation is not None:
                self._speculation.forget(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a running or waiting sequence and release its blocks; it may be added again."""
        if sequence.slot >= 0:
            self._stop_running(sequence)
            return
        self.waiting -= 1
        heap = self._waiting[sequence.tenant]
        heap.remove((sequence.arrival, sequence))
        heapq.heapify(heap)
        if not heap:
            del self._waiting[sequence.tenant]

    def must_know(self) -> bool:
        """Whether the next step cannot be planned before the results of all launched steps are read.

        That is so if the host chooses tokens or computes log probabilities, or if a draft may come next.
        """
        drafts = self._speculation is not None and self._spare_outputs > 0 and self.times.knows(self._decoding)
        return any(self._must_know(sequence, drafts) for sequence in self.running)

    @property
    def _decoding(self) -> int:
        """Number of running sequences that need one token of the next step, since all others are computed."""
        return sum(sequence.computed + 1 >= len(sequence.tokens) + sequence.pending for sequence in self.running)

    @property
    def _spare_outputs(self) -> int:
        """Outputs that a step has left for drafts if every running and waiting sequence takes one of them."""
        return min(self._max_outputs, self._max_tokens) - min(self.max_running, len(self.running) + self.waiting)

    def learn_duration(self, step: PlannedStep, seconds: float, since_idle: float | None) -> None:
        """Learn how long a step took, and charge the sequences for whose drafts it took longer.

        Args:
            seconds: Time from the step's launch, or from the end of the step before if that is later, to its end.
            since_idle: Time since the device had nothing to do, if it runs ahead but planning this step had to wait for
                results; else None.
        """
        if self._stops_anyway:
            since_idle = None
        times = self.times
        # A step of one token each after a stop is longer than one that follows another at once.
        if since_idle is None or step.drafts or not step.cost_shares:
            times.learn(len(step.batch.tokens), seconds, step.prompt_tokens)
        if since_idle is not None:
            times.learn_stop(since_idle - seconds)
        if self._speculation is not None:
            self._speculation.pay(step, times, since_idle)

    @property
    def _stops_anyway(self) -> bool:
        """Whether planning needs the results of every step even without drafts, since the host reads some logits."""
        return any(sequence.reads_logits for sequence in self.running)

    def plan(self) -> PlannedStep | None:
        """The next step; None if there is nothing to compute before the results of launched steps are read."""
        step = PlannedStep()
        if self._speculation is not None:
            self._speculation.begin(step)
        self._plan_decodes(step)
        self._plan_prompts(step)
        self.pool.release([source for source, _ in step.copies])
        if not step.tokens:
            return None
        step.finish(self._tables, self._settings)
        return step

    def steps_alike(self) -> int:
        """Number of coming steps in which every running sequence decodes one token and nothing else happens.

        No sequence ends, is admitted or loses its blocks in them, unless requests are added. 0 unless each running
        sequence has decoded a token before and none of its tokens is still unread.
        """
        for sequence in self.running:
            tokens = len(sequence.tokens)
            if sequence.pending or sequence.computed + 1 != tokens or tokens == sequence.prompt_length:
                return 0
        steps = min(sequence.limit - len(sequence.tokens) for sequence in self.running) - 1
        blocks = sum(self._blocks_for(sequence.computed + steps) - len(sequence.table) for sequence in self.running)
        if blocks > self.pool.available:
            steps = min(sequence.rows - sequence.computed for sequence in self.running)
        return steps

    def repeat(self, durations: list[float]) -> None:
        """Treat steps as done that `steps_alike` counted, one for each duration in seconds; each token chosen is 0."""
        for sequence in self.running:
            sequence.computed += len(durations)
            self._extend(sequence, sequence.computed)
            sequence.tokens += len(durations) * [0]
            self.register(sequence)
        for seconds in durations:
            self.times.learn(len(self.running), seconds)

    def launched(self, step: PlannedStep) -> None:
        """Note that a step has been launched: from now on, the blocks that it fills with known tokens can be shared."""
        if self._speculation is not None:
            self._speculation.launched(step)
        for sequence in step.others:
            self.register(sequence)

    def learn(self, choice: Choice, tokens: list[int]) -> None:
        """Append the tokens that a step has chosen for a sequence, and take back drafted tokens that were rejected."""
        sequence = choice.sequence
        sequence.pending -= 1 + len(choice.draft)
        if sequence.ended:
            return
        sequence.tokens += tokens
        if choice.draft:
            sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
            if tokens:
                sequence.budget.record(len(choice.draft), len(tokens) - 1)
        self.register(sequence)

    def register(self, sequence: Sequence) -> None:
        """Offer a sequence's blocks full of known tokens to others, and release the blocks behind its window."""
        full = min(sequence.computed, len(sequence.tokens)) // self._block_size
        while sequence.registered < full and self._model.shares_prefixes:
            block = sequence.registered
            self.pool.register(sequence.table[block], sequence.digest(block, self._block_size))
            sequence.registered += 1
        self._release_behind(sequence)

    def _release_behind(self, sequence: Sequence) -> None:
        """Release the blocks behind every attention window: no token still to be computed reads their rows.

        Their numbers stay in the table, where they are not read. Blocks that other sequences may share stay in the
        cache.
        """
        window = self._model.read_window
        behind = max(0, min(sequence.computed, len(sequence.tokens)) - window) // self._block_size if window else 0
        if behind > sequence.released:
            self.pool.release(sequence.table[sequence.released : behind])
            sequence.released = behind

    def stop_sharing(self, sequence: Sequence) -> None:
        """Take a sequence's blocks out of the prefix cache, since its keys and values may be wrong."""
        self.pool.forget(sequence.table)

    def start_over(self) -> None:
        """Preempt all running sequences and empty the prefix cache, since the contents of the pool are lost."""
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)
        self.pool.forget(range(self.pool.blocks))

    def _plan_decodes(self, step: PlannedStep) -> None:
        """Add to a step the sequences that have only their last token left to compute, with drafts if worthwhile."""
        ready = [
            sequence
            for sequence in self.running
            if sequence.computed + 1 == len(sequence.tokens) + sequence.pending
            and sequence.computed < max(sequence.limit - 1, sequence.prompt_length)
        ]
        for sequence in [sequence for sequence in ready if sequence.computed >= sequence.rows]:
            if sequence.slot < 0 or not self._make_room(sequence, step):
                ready = [other for other in ready if other is not sequence and other.slot >= 0]
        ready = [sequence for sequence in ready if sequence.slot >= 0]
        drafts = self._drafts(ready, step)
        step.add_singles([sequence for sequence in ready if sequence not in drafts] if drafts else ready)
        for sequence, draft in drafts.items():
            step.add(sequence, [sequence.tokens[-1], *draft], 1 + len(draft), tuple(draft))

    def _drafts(self, ready: list[Sequence], step: PlannedStep) -> dict[Sequence, list[int]]:
        """Drafted tokens for sequences that may profit from them; a draft ends before its sequence's token limit.

        Drafts take only outputs of the step that neither running nor waiting sequences need.
        """
        spare, speculation = self._spare_outputs, self._speculation
        if speculation is None or spare <= 0:
            return {}
        wanted = {}
        for sequence in ready:
            if not sequence.pending:  # invariant 3
                room = min(sequence.limit, self.max_rows) - len(sequence.tokens)
                length = min(speculation.length(sequence), sequence.limit - len(sequence.tokens) - 1, room)
                if length > 0:
                    wanted[sequence] = length
        drafts: dict[Sequence, list[int]] = {}
        worthwhile = speculation.drafts(wanted, len(ready), self.times, self._stops_anyway, step)
        for sequence, draft in worthwhile.items():
            own = sequence.computed + 1
            fitting = draft[: self._extend(sequence, own + min(len(draft), spare)) - own]
            if fitting:
                drafts[sequence] = fitting
                spare -= len(fitting)
            elif draft:
                speculation.pause(sequence)
        return drafts

    def _must_know(self, sequence: Sequence, drafts: bool) -> bool:
        """Whether planning needs the results of a sequence's launched steps.

        `drafts` tells whether a step has room for drafts at all. A sequence with one needs its tokens first.
        """
        if sequence.reads_logits:
            return True
        if self._speculation is None:
            return False
        # How much of a draft is right decides what comes next.
        return sequence.pending > 1 or (drafts and self._speculation.may_draft(sequence))

    def _plan_prompts(self, step: PlannedStep) -> None:
        """Add pieces of prompts to the step.

        Half of the tokens go to the prompts with the fewest tokens left, which are soon done, the others to the
        earliest prompts, which therefore never starve.
        """
        rests = {
            sequence: len(sequence.tokens) - sequence.computed
            for sequence in self.running
            if sequence.computed + 1 < len(sequence.tokens)
        }
        if not rests and not self._waiting:
            return
        budget = self._max_tokens - step.tokens
        if self._prefill_tokens is not None:
            budget = min(budget, self._prefill_tokens)
        elif step.tokens:
            budget = self.times.prompt_tokens(step.tokens, self._max_tokens)
        while sum(rests.values()) - max(rests.values(), default=0) < budget and (admitted := self._admit(step)):
            rests[admitted] = len(admitted.tokens) - admitted.computed
        for sequence, tokens in divided(budget, rests).items():
            if tokens and sequence.slot >= 0:
                self._add_piece(sequence, tokens, step)

    def _add_piece(self, sequence: Sequence, tokens: int, step: PlannedStep) -> None:
        """Add the next tokens of a prompt to a step, `tokens` at most, or none if the pool has no block for them."""
        self._share(sequence, step)
        length = len(sequence.tokens)
        if sequence.computed < sequence.rows or self._make_room(sequence, step):
            last = min(length, sequence.computed + tokens)
            if sequence.is_scoring:
                last = min(last, max(sequence.computed, sequence.scored - 1) + self._scoring_outputs(step))
            sequence.computed, end = self._model.piece(sequence.computed, self._extend(sequence, last))
            first = max(sequence.computed, sequence.scored - 1)
            scored = max(0, min(end, sequence.prompt_length - 1) - first) if sequence.is_scoring else 0
            step.add(sequence, sequence.tokens[sequence.computed : end], int(end == length), scored=scored)

    def _scoring_outputs(self, step: PlannedStep) -> int:
        """Number of outputs that a step has for a prompt whose tokens are scored: each scored token takes one.

        Only a model that rewinds gives several outputs for one sequence.
        """
        return 1 + max(0, self._spare_outputs - step.more_outputs) if self._model.rewinds else 1

    def _admit(self, step: PlannedStep) -> Sequence | None:
        """Let the next waiting sequence run and return it; None if none waits or it has no slot or blocks yet."""
        if not self._waiting or not self._slots:
            return None
        tenant = min(self._waiting, key=lambda name: (self._running_of[name], self._waiting[name][0][0]))
        sequence = self._waiting[tenant][0][1]
        if sequence.pending:
            return None
        computed = sequence.computed
        self._share(sequence, step, copy=False)
        if self._blocks_for(len(sequence.tokens)) - len(sequence.table) + self._reserved() > self.pool.available:
            self._give_back(sequence)
            sequence.computed = computed
            return None
        heapq.heappop(self._waiting[tenant])
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self.waiting -= 1
        sequence.slot = self._slots.pop()
        if not sequence.preempted:
            sequence.cached_tokens = sequence.computed
            self.admitted.append(sequence)
        self._settings[sequence.slot] = sequence.settings
        self._tables[sequence.slot, : len(sequence.table)] = sequence.table
        bisect.insort(self.running, sequence, key=lambda other: other.arrival)
        self._running_of[tenant] += 1
        return sequence

    def _reserved(self) -> int:
        """Blocks kept for running sequences: for the rest of their prompts, and one in a hundred for new tokens."""
        prompts = sum(max(0, self._blocks_for(len(sequence.tokens)) - len(sequence.table)) for sequence in self.running)
        return prompts + (-(-self.pool.blocks // 100) if self.running else 0)

    def _blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.max_rows) // self._block_size)

    def _share(self, sequence: Sequence, step: PlannedStep, copy: bool = True) -> None:
        """Give a sequence those cached blocks that hold its next tokens.

        The last token is always computed, for its logits: where its block is cached too, the sequence gets a copy of
        this block, unless `copy` is False. A prompt whose tokens are to be scored is computed from its first token.
        """
        if sequence.is_scoring:
            return
        size, length = self._block_size, len(sequence.tokens)
        while self._model.shares_prefixes and sequence.computed == sequence.rows and sequence.computed + size <= length:
            index = len(sequence.table)
            last = sequence.computed + size == length
            if last and not copy:
                return
            block = self.pool.find(sequence.digest(index, size))
            if block is None:
                return
            if last:
                target = self.pool.allocate()
                if target is None:
                    self.pool.release([block])
                    return
                step.copies.append((block, target))  # the source is held until the step is planned
                self._append(sequence, target)
                sequence.computed = length - 1
                return
            self._append(sequence, block)
            sequence.computed += size
            sequence.registered = len(sequence.table)

    def _append(self, sequence: Sequence, block: int) -> None:
        if sequence.slot >= 0:
            self._tables[sequence.slot, len(sequence.table)] = block
        sequence.table.append(block)
        sequence.rows += self._block_size

    def _extend(self, sequence: Sequence, rows: int) -> int:
        """Allocate blocks so that a sequence can hold `rows` tokens; return how many fit if the pool runs out."""
        while sequence.rows < rows:
            block = self.pool.allocate()
            if block is None:
                break
            self._append(sequence, block)
        return min(rows, sequence.rows)

    def _make_room(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Allocate a block for a sequence's next token, if need be by preempting later sequences outside the step.

        Returns whether there is one.
        """
        while self._extend(sequence, sequence.computed + 1) <= sequence.computed:
            planned = {*step.singles, *step.others}
            victim = next((other for other in reversed(self.running) if other not in planned), sequence)
            if victim.arrival <= sequence.arrival:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.preempted = True
        self.preemptions += 1
        self.add(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._running_of[sequence.tenant] -= 1
        if not self._running_of[sequence.tenant]:
            del self._running_of[sequence.tenant]
        self._slots.append(sequence.slot)
        sequence.slot = -1
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Release a sequence's blocks; those with a digest stay in the prefix cache."""
        self.pool.release(sequence.table[sequence.released :])
        sequence.table = []
        sequence.registered = sequence.rows = sequence.released = 0


def divided(budget: int, rests: dict[Sequence, int]) -> dict[Sequence, int]:
    """Divide a step's budget of prompt tokens: sequence → number of its tokens to compute, in order of arrival.

    Half of the budget goes to the prompts with the fewest tokens left, all that remains to the earliest prompts.
    """
    earliest = sorted(rests, key=lambda sequence: sequence.arrival)
    shares = dict.fromkeys(earliest, 0)
    half = budget // 2
    for sequence in sorted(rests, key=lambda sequence: rests[sequence]):
        shares[sequence] = min(rests[sequence], half)
        half -= shares[sequence]
    left = budget - sum(shares.values())
    for sequence in earliest:
        more = min(rests[sequence] - shares[sequence], left)
        shares[sequence] += more
        left -= more
    return shares
