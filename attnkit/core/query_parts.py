"""The queries of few heads in several parts, so that every thread of the CPU has work.

The backward of torch's flash kernel for CPUs goes through batch items and heads in parallel, and
through the queries and keys of each by one thread: one item of one head leaves all others idle.
Rows of attention do not depend on each other, so that a part of the queries, with all keys, is as
good an item of a batch; the gradients of keys and values are then sums over the parts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs

__all__ = ["joined_parts", "num_query_parts", "split_queries"]

LEAST_QUERIES = 256  # of a part: with fewer, splitting costs what it gains


def num_query_parts(inputs: Inputs) -> int:
    """In how many parts the queries should go through the CPU's flash kernel; 1: as they are.

    As many as leave no thread idle and none with more than one part, so that the gradients of keys
    and values, one for each part until they are summed, are no more than the threads. Masks and
    biases are not split, nor is what has no backward: the forward is parallel as it is.
    """
    tensors = inputs.query, inputs.key, inputs.value
    if not inputs.query.is_cpu or inputs.is_causal or inputs.has_term:
        return 1
    if torch.compiler.is_compiling():  # which cannot ask for the number of threads
        return 1
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return 1
    num_lanes = inputs.query.shape[0] * inputs.query.shape[1]
    return max(1, min(torch.get_num_threads() // num_lanes, inputs.num_queries // LEAST_QUERIES))


def split_queries(inputs: Inputs, num_parts: int) -> Inputs:
    """The same attention with each part of the queries as a batch item of its own.

    The last part is filled up with zeros. Keys and values are not copied where there is one item.
    """
    missing = -inputs.num_queries % num_parts
    query = F.pad(inputs.query, (0, 0, 0, missing)) if missing else inputs.query
    key, value = (
        tensor[:, None].expand(-1, num_parts, -1, -1, -1).flatten(0, 1)
        for tensor in (inputs.key, inputs.value)
    )
    query = query.unflatten(2, (num_parts, -1)).transpose(1, 2).flatten(0, 1)
    return replace(inputs, query=query, key=key, value=value)


def joined_parts(output: Tensor, inputs: Inputs) -> Tensor:
    """The output of `inputs` from that of its parts, without the filling; a view where the kernel
    laid the heads of a query beside each other."""
    batch = inputs.query.shape[0]
    rows = output.transpose(1, 2).reshape(batch, -1, output.shape[1], output.shape[3])
    return rows[:, : inputs.num_queries].transpose(1, 2)
