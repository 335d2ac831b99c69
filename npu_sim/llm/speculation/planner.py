"""`Speculation`: decides which sequences get drafts in a step, how long these are, and which sequences pay for them.

A device that runs ahead of the host must stop for a draft, which depends on the tokens before it, and again after the
step that verifies the draft. Both stops, the longer step and the time of drafting are charged to the sequences' budgets
(`DraftBudget`).
"""

import time

from npu_sim.llm.engine.planned_step import PlannedStep
from npu_sim.llm.engine.sequence import Sequence
from npu_sim.llm.engine.step_times import StepTimes
from npu_sim.llm.speculation.budget import draft_lengths
from npu_sim.llm.speculation.lookup import Drafter


class Speculation:
    """The drafts of the steps that a `Scheduler` plans.

    Args:
        runs_ahead: Number of steps by which the device runs ahead of the host.
    """

    def __init__(self, drafter: Drafter, runs_ahead: int) -> None:
        self._drafter, self._runs_ahead = drafter, runs_ahead
        self._verified: list[Sequence] = []  # sequences with a draft in the latest launched step

    def forget(self, sequence: Sequence) -> None:
        """Drop all data of a sequence that has ended."""
        self._drafter.forget(sequence)
        self._verified = [other for other in self._verified if other is not sequence]

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether there may be a draft for a sequence once its one token that is under way has been read."""
        return sequence.pending == 1 and self._drafter.may_draft(sequence) and self.length(sequence) > 0

    def length(self, sequence: Sequence) -> int:
        """Number of tokens to draft for a sequence; 0 if it has a grammar or no budget."""
        if sequence.token_filter is not None:
            return 0
        budget, tokens = sequence.budget, len(sequence.tokens)
        return budget.length(tokens) or budget.length(tokens, self._has_long_match(sequence))

    def begin(self, step: PlannedStep) -> None:
        """Charge the stop before a step to the sequences whose drafts the latest launched step verifies.

        Only a device that runs ahead has to stop.
        """
        if self._runs_ahead:
            step.cost_shares = dict.fromkeys(self._verified, 1)

    def launched(self, step: PlannedStep) -> None:
        """Note that a step has been launched, with the sequences whose drafts it verifies."""
        self._verified = [choice.sequence for choice in step.drafts]

    def drafts(
        self, wanted: dict[Sequence, int], rows: int, times: StepTimes, stops_anyway: bool, step: PlannedStep
    ) -> dict[Sequence, list[int]]:
        """Sequence → its draft for the next step, only as long as it is expected to save time.

        If no draft is worth its time, drafting pauses for these sequences. There are no drafts while the time of a step
        without them is unknown. A device that runs ahead must stop for drafting, so a sequence for which the drafter
        finds nothing is not tried again for some tokens. The time in which a draft model first reads a text is charged
        to no sequence.

        Args:
            wanted: Sequence → maximum number of tokens to draft for it.
            rows: Number of tokens of the step without drafts.
            stops_anyway: Whether planning a step needs all earlier results even without drafts.
        """
        if not wanted or not times.knows(rows):
            return {}
        begun = time.perf_counter()
        answers = self._drafter.drafts(wanted)
        drafts = {sequence: draft for sequence, draft in answers.items() if draft}
        reads = len(drafts) < len(answers)
        if not reads:
            step.drafting_seconds = time.perf_counter() - begun
            times.learn_drafting(step.drafting_seconds)
        for sequence in wanted.keys() - answers.keys() if self._runs_ahead else ():
            sequence.budget.back_off(len(sequence.tokens))
        chances = [(x.budget.acceptance_rate(self._has_long_match(x)), len(draft)) for x, draft in drafts.items()]
        overhead = max(times.drafting, 0.0 if stops_anyway else times.stop)
        lengths = dict(zip(drafts, draft_lengths(rows, chances, times.seconds, overhead), strict=True))
        for sequence in wanted:
            step.cost_shares[sequence] = 1 + lengths.get(sequence, 0)
        if reads:
            step.cost_shares = dict.fromkeys(step.cost_shares, 0)
        if not any(lengths.values()):
            for sequence in drafts:
                self.pause(sequence)
        return {sequence: draft[: lengths[sequence]] for sequence, draft in drafts.items()}

    def pause(self, sequence: Sequence) -> None:
        """Draft nothing for a sequence for a while: a draft was not worth its time, or the step had no room for it."""
        sequence.budget.pause(len(sequence.tokens), self._has_long_match(sequence))

    def pay(self, step: PlannedStep, times: StepTimes, since_idle: float | None) -> None:
        """Charge the time by which drafts made a step longer to the budgets of the sequences in `step.cost_shares`.

        Args:
            since_idle: Seconds since a device that runs ahead had nothing to do, if it waited for a draft; else None.
        """
        rows = len(step.singles) + len(step.drafts)
        plain, shares = times.seconds(rows), sum(step.cost_shares.values())
        if not shares or not plain:
            return
        if since_idle is None or step.prompt_tokens:  # of which other tokens, or nothing but noise, may be a part
            stop = times.stop if since_idle is not None else 0.0
            drafted = sum(len(choice.draft) for choice in step.drafts)
            longer = max(stop, step.drafting_seconds) + times.seconds(rows + drafted) - plain
        else:
            longer = since_idle - plain
        for sequence, share in step.cost_shares.items() if longer > 0 else ():
            sequence.budget.spend(len(sequence.tokens), rows * longer / plain * share / shares)

    def _has_long_match(self, sequence: Sequence) -> bool:
        length = sequence.budget.long_match(len(sequence.tokens))
        return length is not None and self._drafter.has_match(sequence, length)
