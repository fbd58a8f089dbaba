"""How long steps and messages take on one kind of machine.

Steps take what `configs.step_times` says, and the longer the more the other role's workers compute, where they share cores
(`Slowdown`). `benchmarks/machine_profile.py` measures all of it; `tandem profile` measures the steps alone, on the machine at
hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from configs.paced.profile import PacedProfile
from configs.profiles import MachineProfile
from configs.step_times import StepTimes
from protocol.errors import InvalidRequestError

LAPTOP = Path(__file__).with_name("laptop.json")
"""Profile of the default model on 2 cores, with one worker of each role and one thread each."""
LAPTOP_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""Bytes of one token's KV in the model that `LAPTOP` was measured with: SmolLM2-135M in bfloat16."""
_MOST_S = 86_400.0
"""Longest time in a profile, in seconds. Sums of longer ones may be more than a float holds."""
_Seconds = Annotated[float, Field(ge=0, le=_MOST_S)]
_Factor = Annotated[float, Field(gt=0, le=1000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Overheads(_Part):
    """Seconds that pass outside of the engines."""

    request_s: _Seconds
    """HTTP, tokens, text: from a request's arrival until it looks for room, and from its first token to the client."""
    message_s: _Seconds
    """Time of one message between a router and a worker."""
    handoff_s: _Seconds
    """From the first token until decode may begin, for a prompt without tokens: the part that does not depend on its length."""
    handoff_token_s: _Seconds
    """The same for each token of a prompt's last chunk; earlier chunks are sent while the next is computed."""
    step_s: _Seconds
    """Between two steps of a worker."""
    output_s: _Seconds
    """Between two steps of a decode worker, for each token that the step made."""


class Slowdown(_Part):
    """Factors on a role's measured step times in a cluster whose processes share the engines' cores."""

    alone: _Factor = 1.0
    """Factor while no worker of the other role computes."""
    beside: _Factor = 1.0
    """Factor while all workers of the other role compute."""

    def at(self, busy: float) -> float:
        """Factor while this share of the other role's workers computes, from 0 to 1."""
        return self.alone + (self.beside - self.alone) * busy


class Slowdowns(_Part):
    """The factors of each role."""

    prefill: Slowdown = Slowdown()
    decode: Slowdown = Slowdown()


class Profile(StepTimes):
    """Step times of one worker of each role, and what passes outside of them."""

    overheads: Overheads
    slowdown: Slowdowns = Slowdowns()
    acceptance: float = Field(default=0.0, ge=0, le=1)
    """Chance that a guessed token is right if all guesses before it in the same step are; 0: none is guessed."""
    machine: dict[str, Any] = Field(default_factory=dict)
    """Description of the machine on which it was measured, for people."""

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile from a JSON file. Raises InvalidRequestError if it can't be read or used."""
        try:
            profile = cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InvalidRequestError(f"{path}: can't be read: {error.strerror}", param="profile") from None
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{path}: this is no profile: {' '.join(str(error).split())}", param="profile") from None
        if (problem := profile._problem()) is not None:
            raise InvalidRequestError(f"{path}: {problem}", param="profile")
        return profile

    def _problem(self) -> str | None:
        """Why no line goes through the measured points; None if lines do."""
        if (problem := self.what_lacks()) is not None:
            return problem
        longest_s = max(*(point.seconds for point in self.prefill), *(point.seconds for point in self.decode))
        return f"a step of {longest_s:g} s; the longest is {_MOST_S:g} s" if longest_s > _MOST_S else None

    @classmethod
    def of_machine(cls, prefill: MachineProfile, decode: MachineProfile) -> Profile | None:
        """Return a profile of the step times that were measured for the two roles; None if there are none.

        What passes outside of the engines, and how workers slow each other down, is taken from `LAPTOP`.
        """
        if not prefill.prefill or not decode.decode:
            return None
        measured = {"prefill": prefill.prefill, "decode": decode.decode, "machine": {"processor": prefill.key.processor}}
        return cls.load(LAPTOP).model_copy(update=measured)

    @classmethod
    def of_paced(cls, paced: PacedProfile) -> Profile:
        """Return the profile of a cluster of paced workers. What passes outside of the engines is taken from `LAPTOP`."""
        overheads = cls.load(LAPTOP).overheads
        handoff = {"handoff_token_s": paced.kv_token_bytes / paced.link_bytes_per_s}
        return cls(prefill=paced.prefill, decode=paced.decode, overheads=overheads.model_copy(update=handoff))

    def with_token_bytes(self, token_bytes: int) -> Profile:
        """Return the profile with handoffs of so many bytes a token, at the rate of `LAPTOP`."""
        handoff_s = self.load(LAPTOP).overheads.handoff_token_s * token_bytes / LAPTOP_TOKEN_BYTES
        return self.model_copy(update={"overheads": self.overheads.model_copy(update={"handoff_token_s": handoff_s})})

    def prefill_step_s(self, chunks: Sequence[tuple[int, int]], decode_busy: float = 0.0) -> float:
        """Seconds of a step of chunks (start, number of tokens), while this share of the decode workers computes."""
        return self.overheads.step_s + self.slowdown.prefill.at(decode_busy) * self.prefill_s(chunks)

    def decode_step(
        self, batch: int, prefill_busy: float = 0.0, most_guesses: int = 0, context: int = 0
    ) -> tuple[float, float]:
        """(base, token): a step of so many streams takes base + token * tokens of context of all together, while this share
        of the prefill workers computes.

        With up to `most_guesses` guessed tokens a stream it is a step's share for one token of each stream: as many are guessed
        as make that least at this `context` of all streams together. A guess is a row of a stream more, which reads no context.
        """
        slowdown, token = self.slowdown.decode.at(prefill_busy), self.decode_parts(batch)[1]
        steps = []
        for guesses in range(most_guesses + 1):
            tokens = sum(self.acceptance**i for i in range(guesses + 1))
            step_s = self.overheads.step_s + slowdown * self.decode_parts(batch * (1 + guesses))[0]
            steps.append((step_s / tokens, slowdown * token / tokens))
        base_s, token_s = min(steps, key=lambda step: step[0] + step[1] * context)
        return self.overheads.output_s * batch + base_s, token_s

    def handoff_s(self, last_chunk: int) -> float:
        """Seconds from the first token until decode may begin, for a last chunk of this many tokens."""
        return self.overheads.handoff_s + self.overheads.handoff_token_s * last_chunk
