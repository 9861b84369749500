"""Datasets, and how their rows are dealt to clients. Importing this loads neither torch nor scikit-learn."""

from fedrelay.data.augment import CropFlip, Normalise, Transform, Transforms
from fedrelay.data.dataset import Dataset
from fedrelay.data.idx import read_idx
from fedrelay.data.partition import Partition
from fedrelay.data.partitioners import DirichletPartitioner, IidPartitioner, OneClassPartitioner, Partitioner
from fedrelay.data.sources import blobs, data_folder, digits, held_out, mnist

__all__ = [
    "CropFlip",
    "Dataset",
    "DirichletPartitioner",
    "IidPartitioner",
    "Normalise",
    "OneClassPartitioner",
    "Partition",
    "Partitioner",
    "Transform",
    "Transforms",
    "blobs",
    "data_folder",
    "digits",
    "held_out",
    "mnist",
    "read_idx",
]
