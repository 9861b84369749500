"""What a measurement was made on, and how much of it others used meanwhile."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import psutil
import torch

from fedrelay.engine.auto import processor


def machine() -> dict[str, Any]:
    """The processor with its bf16 instructions, its cores that we may use, torch."""
    name, flags = processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": name, "bf16": sorted(flags), "cores": cores, "torch": torch.__version__}


def machine_line(about: dict[str, Any]) -> str:
    """The same as a line of text."""
    bf16 = ", ".join(about["bf16"]) or "no bf16 instructions"
    return f"{about['processor']} ({bf16}), {about['cores']} cores, torch {about['torch']}"


class Load:
    """How busy others kept the processors inside a ``with`` block, as a share of all of them.

    Children that are still running, or that were waited for, are ours.
    """

    others: float = 0.0

    def __enter__(self) -> Load:
        self._began = self._now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        busy, own, total = (now - began for now, began in zip(self._now(), self._began, strict=True))
        self.others = max(0.0, (busy - own) / total) if total else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds so far, summed over processors: busy with anything, busy with us, all."""
        all_ = psutil.cpu_times()
        idle = all_.idle + getattr(all_, "iowait", 0.0)
        busy = sum(getattr(all_, f, 0.0) for f in ("user", "nice", "system", "irq", "softirq", "steal"))
        me = psutil.Process()
        spent = me.cpu_times()
        own = spent.user + spent.system + spent.children_user + spent.children_system
        for child in me.children(recursive=True):
            try:
                spent = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            own += spent.user + spent.system + spent.children_user + spent.children_system
        return busy, own, busy + idle
