"""The picture of a node in docs/interpret.md, of a GATv2 that learned the infection graph.

python docs/interpret_graph.py docs/interpret_graph.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import matplotlib

import attnkit
from attnkit.interpret import graph_picture as picture
from attnkit.tasks.graphs import InfectionData

NODE = 46  # three edges from an infected node


def main(path):
    matplotlib.style.use(Path(__file__).with_name("pictures.mplstyle"))
    picture.INK = picture.SOFT = "#7a7a7a"  # which is seen on dark pages too
    from ground_truth_graphs import trained

    data = InfectionData(seed=0)
    data.setup()
    graph = data.graph
    model = trained("gatv2", "infection", data, seed=0).eval()
    inputs = graph.x, graph.edge_index
    seen = attnkit.explain(model, inputs, index=NODE, method="occlusion")
    print(seen.trust())
    seen.save(path, labels=graph.y, class_names=data.class_names)


if __name__ == "__main__":
    main(*sys.argv[1:])
