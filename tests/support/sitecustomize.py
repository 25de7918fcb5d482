"""Python imports this at the start of every process that tests start, for ``PYTHONPATH`` leads here.

Importing torch and torchtune makes a million objects that stay. Collecting garbage meanwhile, as often
as Python does by default, takes a third of the five seconds.
"""

import gc

gc.set_threshold(200_000, 20, 20)
