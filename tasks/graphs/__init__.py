"""Tasks on graphs. `GraphDataModule` reads one graph, and `GraphsDataModule` reads many.

`NodeClassification` and `NodeValues` predict nodes of either; `LinkPrediction` predicts edges of
one graph; `GraphClassification` and `GraphValues` predict whole graphs.
"""

from attnkit.lightning.resume.sampler import EpochSampler as EpochSampler
from attnkit.tasks.graphs.data import FullGraph as FullGraph
from attnkit.tasks.graphs.data import GraphDataModule as GraphDataModule
from attnkit.tasks.graphs.dictionary_lookup import (
    DictionaryLookupData as DictionaryLookupData,
)
from attnkit.tasks.graphs.digits_graph import DigitsGraphData as DigitsGraphData
from attnkit.tasks.graphs.files.ogb import OGBFilesData as OGBFilesData
from attnkit.tasks.graphs.files.own import GraphFilesData as GraphFilesData
from attnkit.tasks.graphs.heterophilous import HeterophilousData as HeterophilousData
from attnkit.tasks.graphs.infection import InfectionData as InfectionData
from attnkit.tasks.graphs.links.data import Links as Links
from attnkit.tasks.graphs.links.given import HeldOut as HeldOut
from attnkit.tasks.graphs.links.module import LinkPrediction as LinkPrediction
from attnkit.tasks.graphs.neighbors import NeighborBatches as NeighborBatches
from attnkit.tasks.graphs.nodes.module import NodeClassification as NodeClassification
from attnkit.tasks.graphs.nodes.module import NodeValues as NodeValues
from attnkit.tasks.graphs.planetoid import PlanetoidData as PlanetoidData
from attnkit.tasks.graphs.pyg import PyGData as PyGData
from attnkit.tasks.graphs.report.attended import NodePredictions as NodePredictions
from attnkit.tasks.graphs.report.callback import NodeReport as NodeReport
from attnkit.tasks.graphs.report.links import LinkReport as LinkReport
from attnkit.tasks.graphs.sampler import InNeighbors as InNeighbors
from attnkit.tasks.graphs.sampler import Sampled as Sampled
from attnkit.tasks.graphs.sampler import sample_neighbors as sample_neighbors
from attnkit.tasks.graphs.whole.data import GraphsDataModule as GraphsDataModule
from attnkit.tasks.graphs.whole.digit_grids import DigitGridsData as DigitGridsData
from attnkit.tasks.graphs.whole.files import GraphsFilesData as GraphsFilesData
from attnkit.tasks.graphs.whole.module import GraphClassification as GraphClassification
from attnkit.tasks.graphs.whole.module import GraphValues as GraphValues
from attnkit.tasks.graphs.whole.pyg import PyGGraphsData as PyGGraphsData
