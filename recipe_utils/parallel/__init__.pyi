from recipe_utils.parallel.fsdp import gradient_sync as gradient_sync
from recipe_utils.parallel.process_group import means_over_ranks as means_over_ranks
from recipe_utils.parallel.ranks import join_ranks as join_ranks
from recipe_utils.parallel.settings import RankSettings as RankSettings
from recipe_utils.parallel.to_device import to_device_ahead as to_device_ahead
