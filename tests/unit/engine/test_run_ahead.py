"""A host that launches steps for a device, at most one ahead of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.run_ahead import RunAhead


@dataclass
class Device:
    """Computes when somebody waits for it."""

    launched: int = 0
    done: int = 0
    most_ahead: int = 0
    waits: list[int] = field(default_factory=list)

    def mark(self) -> Mark:
        self.launched += 1
        self.most_ahead = max(self.most_ahead, self.launched - self.done)
        return Mark(self, self.launched)


@dataclass
class Mark:
    device: Device
    place: int

    def synchronize(self) -> None:
        self.device.waits.append(self.place)
        self.device.done = max(self.device.done, self.place)


def test_a_follower_is_not_ahead() -> None:
    """It tells the first rank that a step is over when it is."""
    device = Device()
    ahead = RunAhead(device.mark, steps=0)
    for step in range(1, 4):
        ahead.launched()
        assert device.done == step


def test_one_step_is_under_way_when_the_next_is_launched() -> None:
    device = Device()
    ahead = RunAhead(device.mark)
    for step in range(1, 6):
        ahead.launched()
        assert device.done == step - 1
    assert device.waits == [1, 2, 3, 4]
    assert device.most_ahead == 2
