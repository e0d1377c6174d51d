"""Tasks on graphs. `GraphDataModule` reads one graph, and `GraphsDataModule` reads many.

`NodeClassification` and `NodeValues` predict nodes of either; `LinkPrediction` predicts edges of
one graph; `GraphClassification` and `GraphValues` predict whole graphs.
"""

from attnkit.lightning.resume.sampler import EpochSampler as EpochSampler
from attnkit.tasks.graphs.data import FullGraph as FullGraph
from attnkit.tasks.graphs.data import GraphDataModule as GraphDataModule
from attnkit.tasks.graphs.datasets.digits import DigitGridsData as DigitGridsData
from attnkit.tasks.graphs.datasets.digits import DigitsGraphData as DigitsGraphData
from attnkit.tasks.graphs.datasets.ogb import OGBFilesData as OGBFilesData
from attnkit.tasks.graphs.datasets.own import GraphFilesData as GraphFilesData
from attnkit.tasks.graphs.datasets.own import GraphsFilesData as GraphsFilesData
from attnkit.tasks.graphs.datasets.published import HeterophilousData as HeterophilousData
from attnkit.tasks.graphs.datasets.published import PlanetoidData as PlanetoidData
from attnkit.tasks.graphs.datasets.pyg import PyGData as PyGData
from attnkit.tasks.graphs.datasets.pyg import PyGGraphsData as PyGGraphsData
from attnkit.tasks.graphs.datasets.synthetic import (
    DictionaryLookupData as DictionaryLookupData,
)
from attnkit.tasks.graphs.datasets.synthetic import InfectionData as InfectionData
from attnkit.tasks.graphs.graph_level import GraphClassification as GraphClassification
from attnkit.tasks.graphs.graph_level import GraphValues as GraphValues
from attnkit.tasks.graphs.link_data import Links as Links
from attnkit.tasks.graphs.links import LinkPrediction as LinkPrediction
from attnkit.tasks.graphs.links import LinkReport as LinkReport
from attnkit.tasks.graphs.many_data import GraphsDataModule as GraphsDataModule
from attnkit.tasks.graphs.negative_pairs import HeldOut as HeldOut
from attnkit.tasks.graphs.node_attention import NodePredictions as NodePredictions
from attnkit.tasks.graphs.node_report import NodeReport as NodeReport
from attnkit.tasks.graphs.nodes import NodeClassification as NodeClassification
from attnkit.tasks.graphs.nodes import NodeValues as NodeValues
from attnkit.tasks.graphs.sampling import InNeighbors as InNeighbors
from attnkit.tasks.graphs.sampling import NeighborBatches as NeighborBatches
from attnkit.tasks.graphs.sampling import Sampled as Sampled
from attnkit.tasks.graphs.sampling import sample_neighbors as sample_neighbors
