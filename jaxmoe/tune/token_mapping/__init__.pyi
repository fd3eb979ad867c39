from .partitions import PartitionBound as PartitionBound
from .partitions import least_of_all_partitions as least_of_all_partitions
from .problem import MappingProblem as MappingProblem
from .problem import exact_seconds as exact_seconds
from .search import MappingResult as MappingResult
from .search import anneal_mapping as anneal_mapping
from .search import tune_mapping as tune_mapping
