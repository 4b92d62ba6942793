"""Ranks as operating-system processes: how they end, report to the supervisor, and store temporary files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import os_process
    from .exit_limit import collect_frames, end_at_once, format_stack, limit_exit, postpone_exit_limit, run_briefly
    from .network import (
        find_source_address,
        interface_of,
        is_named_loopback,
        name_gloo_interface,
        open_datagram_socket,
    )
    from .os_process import (
        IDENTITY,
        die_with_parent,
        end_by_signal,
        forget_unfinished,
        has_ended,
        identify_host,
        identify_process,
        is_alive,
        is_unfinished,
        kill_session,
        leave_on_sigterm,
        note_unfinished,
        open_scratch,
        read_start_time,
        read_stat,
        sweep,
    )
    from .rank_board import (
        Dumps,
        Idleness,
        Pulse,
        RankBoard,
        explain_silence,
        fetch_stacks,
        is_stage_running,
        mark_leaving,
        mark_stage,
        was_signaled,
        write_beat,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
