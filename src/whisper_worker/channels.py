"""What is kept of a recording's channels: their mix, one of them, or each on its own. Knows samples, and no files."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from whisper_worker.errors import BadInput, TooLong

Samples = NDArray[np.float32]
SAMPLE_RATE = 16_000

MAX_SPLIT = 8  # channels; more are no people, but a stage
CANCELLED = 0.1  # a mix this much quieter (amplitude) than its loudest channel has cancelled itself out
LOOK = SAMPLE_RATE // 10  # samples in which that is looked for
WORTH_A_WORD_S = 0.5
SAME = 0.03  # channels that differ by no more of their amplitude are one: codecs leave less of a difference
FAINT = 0.03  # of the loudest block's amplitude: in fainter blocks noise is all the difference


class Kept(ABC):
    """Blocks of samples, of shape (channels, n) and any number of channels, → `tracks` of one length.

    Where the number of channels changes midway, a mono stretch is on every channel, and a channel that isn't there is
    silent. Raises TooLong as soon as the tracks together are longer than `max_samples`, which are `max_seconds`.
    """

    def __init__(self, max_samples: float, max_seconds: float) -> None:
        self._max_samples, self._max_seconds = max_samples, max_seconds
        self._tracks = [_Track()]

    def add(self, block: Samples) -> None:
        self._keep(np.nan_to_num(block, copy=False, nan=0.0, posinf=0.0, neginf=0.0))

    def tracks(self) -> tuple[Samples, ...]:
        """Once, when all blocks are there. Raises BadInput."""
        return tuple(_within_range(track.samples) for track in self._tracks)

    def warnings(self) -> Iterator[str]:
        """Sentences for the caller, beside those tracks."""
        yield from ()

    @property
    def samples(self) -> int:
        """In each track, by now."""
        return self._tracks[0].length

    @abstractmethod
    def _keep(self, block: Samples) -> None: ...

    def _append(self, rows: Samples) -> None:
        if (self.samples + rows.shape[1]) * len(rows) > self._max_samples:
            counted = f", which count for each of its {len(rows)} channels" if len(rows) > 1 else ""
            raise TooLong(f"the audio is longer than the {self._max_seconds:g} s that are allowed{counted}")
        for track, row in zip(self._tracks, rows, strict=True):
            track.append(row)


class Mix(Kept):
    """The mean of all channels; of two, one of them wherever they cancel each other out: wired the wrong way round, the
    one is the other's opposite."""

    def __init__(self, max_samples: float, max_seconds: float) -> None:
        super().__init__(max_samples, max_seconds)
        self._instead = 0  # the channel taken where they cancel
        self._loudest = 0.0  # mean energy
        self._cancelled: list[tuple[float, int, int]] = []  # energy, samples and channel of each such stretch

    def _keep(self, block: Samples) -> None:
        mono = block[0] if len(block) == 1 else block.mean(axis=0, dtype=np.float64).astype(np.float32)
        if len(block) == 2:  # of many channels one alone may speak: quiet, not cancelled
            length = block.shape[1]
            for begin in range(0, max(length - LOOK // 2, 1), LOOK):
                end = begin + LOOK if length - begin - LOOK >= LOOK // 2 else length  # a short rest tells nothing
                self._put_back(block[:, begin:end], mono[begin:end])
        self._append(mono[None])

    def _put_back(self, sides: Samples, mixed: Samples) -> None:
        """What the mix, a view, has lost."""
        energies = np.square(sides, dtype=np.float64).mean(axis=1)
        loudest = float(energies.max())
        self._loudest = max(self._loudest, loudest)
        if float(np.square(mixed, dtype=np.float64).mean()) >= CANCELLED**2 * loudest:
            return
        if energies[self._instead] < loudest / 2:  # else it stays: each change is heard
            self._instead = int(energies.argmax())
        mixed[:] = sides[self._instead]
        self._cancelled.append((loudest, len(mixed), self._instead))

    def warnings(self) -> Iterator[str]:
        heard = [
            (samples, channel) for energy, samples, channel in self._cancelled if energy > FAINT**2 * self._loudest
        ]
        seconds = sum(samples for samples, _ in heard) / SAMPLE_RATE
        if seconds >= WORTH_A_WORD_S:
            used = "only channel 0 was" if {channel for _, channel in heard} == {0} else "only one of them was"
            yield f"the channels cancel each other out when mixed, for {seconds:.1f} s: {used} used there"


class One(Kept):
    """The channel with a number, from 0."""

    def __init__(self, max_samples: float, max_seconds: float, channel: int) -> None:
        super().__init__(max_samples, max_seconds)
        self._channel = channel
        self._most = 0

    def _keep(self, block: Samples) -> None:
        self._most = max(self._most, len(block))
        self._append(_as_channels(block, self._channel + 1)[self._channel : self._channel + 1])

    def tracks(self) -> tuple[Samples, ...]:
        # Not before all is read: HE-AAC and joined files begin with fewer channels than they have.
        if self.samples and self._channel >= self._most:
            raise BadInput(f"channels: the audio has {_count(self._most, 'channel')}, numbered from 0")
        return super().tracks()


class Split(Kept):
    """Each channel for itself; those that are all the same once."""

    def __init__(self, max_samples: float, max_seconds: float) -> None:
        super().__init__(max_samples, max_seconds)
        self._loudness: list[float] = []  # mean energy of each block's loudest channel
        self._difference: list[float] = []  # of each block from its first channel

    def _keep(self, block: Samples) -> None:
        if len(block) > MAX_SPLIT:
            raise BadInput(f"channels: the audio has {len(block)}, no more than {MAX_SPLIT} can be split")
        while len(self._tracks) < len(block):
            self._tracks.append(self._tracks[0].copy() if len(self._tracks) == 1 else _Track(self.samples))
        rows = _as_channels(block, len(self._tracks))
        self._compare(rows)
        self._append(rows)

    def _compare(self, rows: Samples) -> None:
        if rows.size:
            exact = rows.astype(np.float64)
            self._loudness.append(float(np.square(exact).mean(axis=1).max()))
            self._difference.append(float(np.square(exact - exact[0]).mean(axis=1).max()))

    def tracks(self) -> tuple[Samples, ...]:
        return super().tracks()[:1] if self._are_same else super().tracks()

    def warnings(self) -> Iterator[str]:
        if self.samples and len(self._tracks) == 1:
            yield "the audio has only one channel: there was nothing to split"
        elif self._are_same:
            yield f"the {len(self._tracks)} channels are the same: only channel 0 was used"

    @property
    def _are_same(self) -> bool:
        """Block by block: someone who speaks for a few seconds of an hour makes a difference."""
        if len(self._tracks) == 1 or not self._loudness:
            return False
        loudness = np.array(self._loudness)
        level = np.maximum(loudness, FAINT**2 * loudness.max())
        return bool((np.array(self._difference) <= SAME**2 * level).all())


class _Track:
    """Samples that grow in place: a list of blocks, joined in the end, takes twice the memory, and isn't given back."""

    def __init__(self, length: int = 0) -> None:
        self._room: Samples = np.zeros(length, np.float32)
        self.length = length

    def append(self, samples: Samples) -> None:
        start, self.length = self.length, self.length + len(samples)
        if self.length > len(self._room):
            self._room.resize(max(self.length, len(self._room) * 5 // 4), refcheck=False)
        self._room[start : self.length] = samples

    def copy(self) -> "_Track":
        other = _Track(self.length)
        other._room[:] = self._room[: self.length]
        return other

    @property
    def samples(self) -> Samples:
        self._room.resize(self.length, refcheck=False)
        return self._room


def _as_channels(block: Samples, count: int) -> Samples:
    """A block with `count` channels or more: a mono one on each, else silence where there are too few."""
    if len(block) >= count:
        return block
    return block.repeat(count, axis=0) if len(block) == 1 else np.pad(block, ((0, count - len(block)), (0, 0)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _within_range(samples: Samples) -> Samples:
    """Float files may hold any numbers: too loud ones are scaled down (a few outliers aside), the rest clipped."""
    if not len(samples) or max(samples.max(), -samples.min()) <= 1.0:
        return samples
    loud = float(np.percentile(np.abs(samples), 99.9))
    return np.asarray(np.clip(samples / max(loud, 1.0), -1.0, 1.0), np.float32)
