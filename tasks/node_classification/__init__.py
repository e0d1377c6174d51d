"""Node classification: `NodeClassification` learns what a `GraphDataModule` reads."""

from attnkit.lightning.resume.sampler import EpochSampler as EpochSampler
from attnkit.tasks.node_classification.data import FullGraph as FullGraph
from attnkit.tasks.node_classification.data import GraphDataModule as GraphDataModule
from attnkit.tasks.node_classification.dictionary_lookup import (
    DictionaryLookupData as DictionaryLookupData,
)
from attnkit.tasks.node_classification.digits_graph import DigitsGraphData as DigitsGraphData
from attnkit.tasks.node_classification.files.ogb import OGBFilesData as OGBFilesData
from attnkit.tasks.node_classification.files.own import GraphFilesData as GraphFilesData
from attnkit.tasks.node_classification.heterophilous import HeterophilousData as HeterophilousData
from attnkit.tasks.node_classification.infection import InfectionData as InfectionData
from attnkit.tasks.node_classification.module import NodeClassification as NodeClassification
from attnkit.tasks.node_classification.neighbors import NeighborBatches as NeighborBatches
from attnkit.tasks.node_classification.planetoid import PlanetoidData as PlanetoidData
from attnkit.tasks.node_classification.pyg import PyGData as PyGData
from attnkit.tasks.node_classification.report.attended import NodePredictions as NodePredictions
from attnkit.tasks.node_classification.report.callback import NodeReport as NodeReport
from attnkit.tasks.node_classification.sampler import InNeighbors as InNeighbors
from attnkit.tasks.node_classification.sampler import Sampled as Sampled
from attnkit.tasks.node_classification.sampler import sample_neighbors as sample_neighbors
