"""Node classification: `NodeClassification` learns what a `GraphDataModule` reads."""

from attnkit.lightning.resume.sampler import EpochSampler
from attnkit.tasks.node_classification.data import FullGraph, GraphDataModule
from attnkit.tasks.node_classification.dictionary_lookup import DictionaryLookupData
from attnkit.tasks.node_classification.digits_graph import DigitsGraphData
from attnkit.tasks.node_classification.heterophilous import HeterophilousData
from attnkit.tasks.node_classification.module import NodeClassification
from attnkit.tasks.node_classification.neighbors import NeighborBatches
from attnkit.tasks.node_classification.planetoid import PlanetoidData
from attnkit.tasks.node_classification.pyg import PyGData
from attnkit.tasks.node_classification.sampler import InNeighbors, Sampled, sample_neighbors

__all__ = [
    "DictionaryLookupData",
    "DigitsGraphData",
    "EpochSampler",
    "FullGraph",
    "GraphDataModule",
    "HeterophilousData",
    "InNeighbors",
    "NeighborBatches",
    "NodeClassification",
    "PlanetoidData",
    "PyGData",
    "Sampled",
    "sample_neighbors",
]
