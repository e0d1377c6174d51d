"""Node classification: `NodeClassification` learns what a `GraphDataModule` reads."""

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
from attnkit.tasks.graphs.module import NodeClassification as NodeClassification
from attnkit.tasks.graphs.neighbors import NeighborBatches as NeighborBatches
from attnkit.tasks.graphs.planetoid import PlanetoidData as PlanetoidData
from attnkit.tasks.graphs.pyg import PyGData as PyGData
from attnkit.tasks.graphs.report.attended import NodePredictions as NodePredictions
from attnkit.tasks.graphs.report.callback import NodeReport as NodeReport
from attnkit.tasks.graphs.sampler import InNeighbors as InNeighbors
from attnkit.tasks.graphs.sampler import Sampled as Sampled
from attnkit.tasks.graphs.sampler import sample_neighbors as sample_neighbors
