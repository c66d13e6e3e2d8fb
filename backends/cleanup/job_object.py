"""A job object of Windows: when the last handle to it is closed, by the end of its owner, too,
Windows ends all processes in it. Linux has groups of processes and the `keeper` instead.

https://learn.microsoft.com/windows/win32/procthread/job-objects
"""

from __future__ import annotations

import ctypes
from typing import Any

_EXTENDED_LIMITS = 9
_KILL_ON_JOB_CLOSE = 0x2000
_KILLED = 1


class JobObject:
    """One job object. A process belongs to it from `add` on, with all that it starts afterwards."""

    def __init__(self) -> None:
        """Make an empty one.

        Raises:
            OSError: Windows refuses.
        """
        self._kernel = _kernel32()
        self._handle = self._kernel.CreateJobObjectW(None, None)
        if not self._handle:
            raise _last_error()
        limits = _Limits()
        limits.basic.flags = _KILL_ON_JOB_CLOSE
        if not self._kernel.SetInformationJobObject(
            self._handle, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)
        ):
            error = _last_error()
            self._kernel.CloseHandle(self._handle)
            raise error

    def add(self, process: int | None = None) -> None:
        """Take a process in.

        Args:
            process: its handle; None: this process.

        Raises:
            OSError: it has ended, or Windows refuses.
        """
        handle = self._kernel.GetCurrentProcess() if process is None else process
        if not self._kernel.AssignProcessToJobObject(self._handle, handle):
            raise _last_error()

    def end(self) -> None:
        """End every process in it. Once is enough; never raises."""
        handle, self._handle = self._handle, None
        if handle:
            self._kernel.TerminateJobObject(handle, _KILLED)
            self._kernel.CloseHandle(handle)


class _Basic(ctypes.Structure):
    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("least_memory", ctypes.c_size_t),
        ("most_memory", ctypes.c_size_t),
        ("processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority", ctypes.c_uint32),
        ("scheduling", ctypes.c_uint32),
    )


class _Limits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("basic", _Basic),
        ("transferred", ctypes.c_ulonglong * 6),
        ("memory", ctypes.c_size_t * 4),
    )


def _kernel32() -> Any:
    system: Any = ctypes
    kernel = system.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p)
    kernel.SetInformationJobObject.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.AssignProcessToJobObject.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    kernel.TerminateJobObject.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    kernel.CloseHandle.argtypes = (ctypes.c_void_p,)
    return kernel


def _last_error() -> OSError:
    system: Any = ctypes
    error: OSError = system.WinError(system.get_last_error())
    return error
