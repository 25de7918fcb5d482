"""Exit codes, signals and an environment variable that the launcher and its ranks share."""

import signal

CONFIG_ERROR_EXIT_CODE = 2
"""Exit code of all ranks and the launcher after a config error."""
REPORTED_EXIT_CODE = 3
"""Exit code of a rank whose error has been reported, by itself or by another rank."""
USER_SIGNALS = signal.SIGUSR1, signal.SIGUSR2
"""Signals of schedulers before a time limit, blocked until handlers are installed: by default they end a process."""
LAUNCHER_PID = "TORCHTUNE_UPDATE_STEP_LAUNCHER_PID"
"""Environment variable of ranks with the process id of their launcher."""
