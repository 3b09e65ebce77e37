"""Long work in steps that are kept: a killed run begins again after the last step it finished."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from pluralign.core.distributed import ALONE, Processes
from pluralign.core.files import write_whole

UNFINISHED = ".unfinished-"
"""How the names of folders begin that hold work under way."""
Arrays = Mapping[str, npt.NDArray[Any]]


class Steps:
    """Results of named steps, kept in a folder that belongs to one piece of work.

    The work is told by ``inputs``: another data set, option or version is another work, and starts from nothing. Each
    step must be deterministic, so that a resumed run ends as an unbroken one would.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, inputs: Mapping[str, Any], processes: Processes = ALONE
    ) -> None:
        self.inputs = inputs
        self.folder = folder
        self.processes = processes
        self._done: dict[str, dict[str, npt.NDArray[Any]]] = {}

    @property
    def path(self) -> Path | None:
        """The folder of this piece of work, where there is one."""
        if self.folder is None:
            return None
        key = hashlib.sha256(json.dumps(self.inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return Path(self.folder) / f"{UNFINISHED}{key}"

    def __call__(self, name: str, compute: Callable[[], Arrays]) -> dict[str, npt.NDArray[Any]]:
        """Return the step's arrays: as they were if the step was finished before, else computed and kept."""
        if name not in self._done:
            self._done[name] = self._read_or_compute(name, compute)
        return self._done[name]

    def _read_or_compute(self, name: str, compute: Callable[[], Arrays]) -> dict[str, npt.NDArray[Any]]:
        if self.path is None:
            return dict(compute())
        file = self.path / f"{name}.safetensors"
        known = self.processes.agreed(lambda: safetensors.numpy.load_file(file) if file.is_file() else None)
        if known is not None:
            return dict(known)
        arrays = {key: np.asarray(array, order="C") for key, array in compute().items()}
        if self.processes.first:
            with write_whole(file) as partial:
                partial.write_bytes(safetensors.numpy.save(arrays))
        return arrays

    def finish(self) -> None:
        """Remove what was kept, this work's and that of abandoned ones in the same folder."""
        if self.folder is not None and self.processes.first:
            for path in Path(self.folder).glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)
