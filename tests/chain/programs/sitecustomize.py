"""Every program of the chain writes its threads' stacks to its log on SIGUSR1."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, all_threads=True)
