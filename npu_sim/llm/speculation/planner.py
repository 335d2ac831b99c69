"""`DraftPlanner`: which sequences get drafts in a step, how long these are, and what that costs the sequences.

A device that runs ahead of the host must stop for a draft, since it depends on the tokens before it, and again behind
the step that has it, since only then it is known how much of it was right. Both stops, the longer step and the time of
looking are charged to the sequences that they were for (see `DraftControl`).
"""

import time

from npu_sim.llm.engine.planned_step import PlannedStep, StepBuilder
from npu_sim.llm.engine.sequence import Sequence
from npu_sim.llm.engine.step_times import StepTimes
from npu_sim.llm.speculation.control import worthwhile
from npu_sim.llm.speculation.lookup import Drafter


class DraftPlanner:
    """Chooses drafts for the steps that a `Scheduler` plans.

    Args:
        runs_ahead: Whether the device runs ahead of the host.
    """

    def __init__(self, drafter: Drafter, runs_ahead: int) -> None:
        self._drafter, self._runs_ahead = drafter, runs_ahead
        self._last: list[Sequence] = []  # with a draft in the latest launched step

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._drafter.forget(sequence)
        self._last = [other for other in self._last if other is not sequence]

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether there may be a draft once the one token that is under way is known."""
        return sequence.pending == 1 and self._drafter.may_draft(sequence) and self.length(sequence) > 0

    def length(self, sequence: Sequence) -> int:
        """How many tokens to draft."""
        control, tokens = sequence.control, len(sequence.tokens)
        if control is None or sequence.token_filter is not None:
            return 0
        return control.length(tokens) or control.length(tokens, self._is_sure(sequence))

    def begin(self, step: StepBuilder) -> None:
        """Have those pay for the stop before a step whose drafts were in the step before it."""
        if self._runs_ahead:
            step.payers = dict.fromkeys(self._last, 1)

    def launched(self, step: PlannedStep) -> None:
        """The step has been launched."""
        self._last = [choice.sequence for choice in step.drafts]

    def drafts(
        self, wanted: dict[Sequence, int], rows: int, times: StepTimes, stops_anyway: bool, step: StepBuilder
    ) -> dict[Sequence, list[int]]:
        """The drafts of up to that many tokens, as far as they are worth their time in a step of `rows` tokens.

        Where no draft is, none is made for a while. Where the time of a step without drafts is not known, this one has
        none. A device that runs ahead must stop while a draft is looked for, so a sequence for which there is none is
        left out for some tokens. Reading a text, which takes a drafter that is a model its time once, is charged to
        nobody.

        Args:
            stops_anyway: Each step needs the results before it, drafts or not.
        """
        if not wanted or not times.knows(rows):
            return {}
        begun = time.perf_counter()
        found = self._drafter.drafts(wanted)
        drafts = {sequence: draft for sequence, draft in found.items() if draft}
        reads = len(drafts) < len(found)
        if not reads:
            step.drafting_seconds = time.perf_counter() - begun
            times.learn_drafting(step.drafting_seconds)
        if self._runs_ahead:
            for sequence in wanted.keys() - found.keys():
                if sequence.control is not None:
                    sequence.control.wait(len(sequence.tokens))
        chances = [(self._probability(sequence), len(draft)) for sequence, draft in drafts.items()]
        lengths = worthwhile(rows, chances, times.seconds, max(times.drafting, 0.0 if stops_anyway else times.stop))
        drafted = dict(zip(drafts, lengths, strict=True))
        for sequence in wanted:
            step.payers[sequence] = 1 + drafted.get(sequence, 0)
        if reads:
            step.payers = dict.fromkeys(step.payers, 0)
        if not any(lengths):
            for sequence in drafts:
                self.pause(sequence)
        return {sequence: draft[: drafted[sequence]] for sequence, draft in drafts.items()}

    def pause(self, sequence: Sequence) -> None:
        """Make no draft for a while: one was not worth its time, or there was no room for it."""
        if sequence.control is not None:
            sequence.control.pause(len(sequence.tokens), self._is_sure(sequence))

    def charge(self, step: PlannedStep, times: StepTimes, since_idle: float | None) -> None:
        """Charge the sequences for whose drafts a step took longer than it would have without.

        Args:
            since_idle: How long it took from when a device that runs ahead had nothing to do, if that was for drafts.
        """
        rows = len(step.singles) + len(step.drafts)
        plain = times.seconds(rows)
        shares = sum(step.payers.values())
        if not shares or not plain:
            return
        if since_idle is None or step.prompt_tokens:  # of which other tokens, or nothing but noise, may be a part
            stop = times.stop if since_idle is not None else 0.0
            drafted = sum(len(choice.draft) for choice in step.drafts)
            longer = max(stop, step.drafting_seconds) + times.seconds(rows + drafted) - plain
        else:
            longer = since_idle - plain
        for sequence, share in step.payers.items():
            if sequence.control is not None and longer > 0:
                sequence.control.spend(len(sequence.tokens), rows * longer / plain * share / shares)

    def _probability(self, sequence: Sequence) -> float:
        """How probable it is that a drafted token is right if those before it are."""
        return sequence.control.probability(self._is_sure(sequence)) if sequence.control is not None else 0.0

    def _is_sure(self, sequence: Sequence) -> bool:
        """Whether there is evidence that a draft is right."""
        if sequence.control is None:
            return False
        evidence = sequence.control.evidence(len(sequence.tokens))
        return evidence is not None and self._drafter.is_sure(sequence, evidence)
