"""Hostile `_target_`s, tried under an audit hook: `python hostile.py FOLDER`, by test_hostile.py.

FOLDER is on the module path and holds canary.py, which must not be imported. Prints as JSON what
was not refused and what was run, imported, opened or sent meanwhile.
"""

import json
import sys
import warnings
from contextlib import suppress
from importlib import import_module

from attnkit.launch.config.permission import Consent
from attnkit.lightning.build import HOMES, build
from attnkit.lightning.errors import UserError

TARGETS = [
    # Python's own
    "os.system", "subprocess.Popen", "builtins.exec", "builtins.getattr", "pickle.loads",
    "importlib.import_module", "runpy.run_path", "shutil.rmtree", "pathlib.Path",
    "urllib.request.urlopen", "socket.create_connection", "ctypes.CDLL", "operator.attrgetter",
    "functools.partial", "types.CodeType", "logging.config.dictConfig", "multiprocessing.Process",
    "__main__.main", "antigravity.geohash",
    # other packages that are there anyway, and one that leaves a trace
    "yaml.unsafe_load", "numpy.load", "hydra.utils.instantiate", "omegaconf.OmegaConf.load",
    "jinja2.Template", "pytorch_lightning.Trainer", "canary.Net", "canary.sub.Net",
    "huggingface_hub.snapshot_download",
    # torch beyond its modules and optimizers
    "torch.load", "torch.compile", "torch.Tensor", "torch.hub.load", "torch.os.system",
    "torch.serialization.os.remove", "torch.utils.cpp_extension.load_inline",
    "torch.utils.bottleneck.__main__.main", "torch.utils.data.DataLoader",
    "torch.distributed.run.main", "torch.distributed.nn.RemoteModule",
    "torch.multiprocessing.spawn", "torch.jit.load", "torch.jit.ScriptModule",
    "torch.fx.GraphModule", "torch.package.PackageImporter", "torch.export.load", "torch.onnx",
    "torch.ops.load_library", "torch._inductor.codecache.PyCodeCache.load",
    "torch._C.import_ir_module", "torch.ao.nn.quantized.Linear",
    # through what an allowed place has imported for itself
    "torch.nn.modules.module.functools.partial", "torch.nn.functional.importlib.import_module",
    "torch.nn.functional.torch.onnx", "torch.nn.modules.torch.hub.load",
    "torch.optim.lr_scheduler.types.FunctionType",
    "torch.nn.utils.parametrize.torch.jit.ScriptModule",
    "torchvision.models.feature_extraction.fx.GraphModule",
    "torchvision.transforms.v2._transform.enum.Enum",
    "torch_geometric.nn.sequential.inspect.getsource", "torch_geometric.nn.fx.GraphModule",
    "torchmetrics.functional.image.lpips.os.system",
    "lightning.pytorch.callbacks.model_checkpoint.shutil.rmtree",
    "lightning.pytorch.trainer.trainer.os.system",
    "lightning.pytorch.loggers.tensorboard.os.system",
    # functions, methods, dunders and privates of what is allowed
    "torch.nn.Module.load_state_dict", "torch.nn.Module.apply",
    "torch.nn.Module.__init__.__globals__.os.system", "torch.nn.Module.__subclasses__",
    "torch.nn.__loader__.load_module", "torch.nn.init.normal_", "torch.nn.utils.clip_grad_norm_",
    "torch.nn._reduction.get_enum", "lightning.LightningModule.load_from_checkpoint",
    "lightning.Fabric", "lightning.seed_everything", "lightning.pytorch.cli.instantiate_module",
    "lightning.pytorch.demos.boring_classes.BoringModel",
    "lightning.pytorch.utilities.migration.migrate_checkpoint", "lightning.app.LightningApp",
    "lightning.pytorch.tuner.Tuner", "timm.models.load_state_dict",
    "timm.models.build_model_with_cfg", "timm.utils.ModelEma",
    "timm.models._factory.create_model_from", "timm.layers.create_act_layer",
    "torchvision.datasets.CIFAR10", "torchvision.io.read_image",
    "torchvision.extension._load_library", "torchvision.models.get_weight",
    "torchvision.set_image_backend", "torch_geometric.datasets.Planetoid",
    "torch_geometric.compile", "torch_geometric.nn.SchNet.from_qm9_pretrained",
    "torch_geometric.explain.CaptumExplainer", "torchmetrics.functional.image.lpips._LPIPS",
    "torchmetrics.utilities.data.apply_to_collection",
    # attnkit's own
    "attnkit.launch.main.sys.exit", "attnkit.launch.main.main",
    "attnkit.launch.several.save_results", "attnkit.launch.several.subprocess.Popen",
    "attnkit.launch.folder.take_back", "attnkit.launch.sweep.start.sweep",
    "attnkit.lightning.callbacks.progress.Progress.print", "attnkit.lightning.build",
    "attnkit.attend", "attnkit.lightning.build.import_module", "attnkit.lightning.allowing",
    "attnkit.__main__.main", "attnkit.lightning.files.replacing",
    "attnkit.lightning.resume.checkpoints.load",
    "attnkit.lightning.modules.module.TaskModule.load_from_checkpoint", "attnkit.interop.from_timm",
    "attnkit.tasks.image_classification.data.tempfile.TemporaryDirectory", "attnkit.conf.os",
    # look-alikes and what is not a name
    "tоrch.nn.Linear", "torch.nn.Lіnear", "ｔｏｒｃｈ.nn.Linear", "torch․nn․Linear",
    " torch.nn.Linear",
    "torch.nn.Linear ", "torch.nn.Linear\n", "torch.nn.\u200bLinear", "torch .nn.Linear",
    ".nn.Linear", "..os.system", "torch..nn", "torch.nn.", "torch", "", ".", "torch/nn/Linear",
    "torch.nn:Linear", "torch.nn.Linear()", "torch.nn.Linear;os.system", "torch.nn['Linear']",
    "Torch.NN.Linear", "__import__('os').system", "lambda: 0", "${oc.env:HOME}",
    "file:///tmp/evil.py", "evil.py", "torch.nn.Linear#", "torch.nn.0", "torch.nn\x00.Linear",
    "attnkit-evil.Net", "nn.Linear",
]  # fmt: skip

TENSOR = {"_target_": "torch.nn.Identity"}
TIMM = {"_target_": "timm.create_model"}
FID = {"_target_": "torchmetrics.image.FrechetInceptionDistance"}

# Allowed classes and functions, given what leads to code, files or programs of one's choice.
NODES = [
    {"_target_": "torch_geometric.nn.Sequential", "_args_": ["x: exec('import canary')", []]},
    {"_target_": "torch_geometric.nn.sequential.Sequential", "input_args": "x", "modules": []},
    {"_target_": "timm.models.FeatureGraphNet", "model": TENSOR, "out_indices": [0]},
    {"_target_": "timm.models.GraphExtractNet", "model": TENSOR, "return_nodes": ["x"]},
    {"_target_": "torchvision.models.feature_extraction.DualGraphModule", "root": TENSOR},
    {**TIMM, "model_name": "resnet18", "checkpoint_path": "evil.ckpt"},
    {**TIMM, "_args_": ["resnet18", False, None, None, "evil.ckpt"]},
    {**TIMM, "_args_": ["resnet18"], "pretrained_cfg": {"file": "evil"}},
    {**TIMM, "_args_": ["resnet18"], "pretrained_cfg_overlay": {"url": "x"}},
    {"_target_": "timm.models.create_model", "model_name": "resnet18", "cache_dir": "evil"},
    {**TIMM, "model_name": "local-dir:evil"},
    {**TIMM, "model_name": "hf-hub:someone/evil"},
    {**TIMM, "model_name": "hf_hub:someone/evil", "pretrained": True},
    {**TIMM, "model_name": "../evil"},
    {**TIMM, "_args_": [["resnet18"]]},
    {**TIMM, "_args_": "resnet18"},
    {**FID, "feature_extractor_weights_path": "x"},
    {"_target_": "lightning.pytorch.loggers.WandbLogger", "settings": {"x_executable": "true"}},
    {"_target_": "torch.nn.Linear", "_args_": [3, 3], "_convert_": "all"},
    {"_target_": "torch.nn.Linear", "_args_": [3, 3], "_call_": "os.system"},
    {"_target_": ["torch.load"]},
    {"_target_": {"_target_": "torch.load"}},
    {"_target_": None},
]  # fmt: skip

# A string where a function is expected stays a string, whatever the constructor thinks of it.
STRINGS = [
    {"_target_": "torchvision.models.get_model", "_args_": ["resnet18"], "weights": "evil.pth"},
    {"_target_": "lightning.pytorch.callbacks.LambdaCallback", "on_fit_start": "canary.run"},
    {"_target_": "lightning.pytorch.callbacks.ModelPruning", "pruning_fn": "canary.run"},
    {"_target_": "torch.nn.TransformerEncoderLayer", "_args_": [8, 2], "activation": "torch.load"},
    {"_target_": "torch.optim.lr_scheduler.LambdaLR", "_args_": [3], "lr_lambda": "torch.load"},
    {"_target_": "torchvision.transforms.v2.Lambda", "lambd": "os.system"},
    {"_target_": "torchvision.models.get_model", "_args_": ["vgg11"], "norm": "canary.Net"},
    {**TIMM, "_args_": ["resnet18"], "act_layer": "canary.Net"},
    {"_target_": "torch_geometric.nn.GATConv", "_args_": [3, 3], "aggr": "canary.Net"},
    {"_target_": "torch_geometric.nn.MLP", "_args_": [[3, 3]], "act": "canary.Net"},
    {"_target_": "torch_geometric.nn.aggr.MultiAggregation", "aggrs": ["sum"], "mode": "load"},
    {"_target_": "torchmetrics.metric.CompositionalMetric", "_args_": ["torch.load", 1, 2]},
    {"_target_": "attnkit.ViT", "image_size": 8, "patch_size": 4, "norm": "canary.Net"},
]  # fmt: skip

# Named above, and allowed; imported before the watch begins, as all HOMES are.
ALLOWED_MODULES = (
    "attnkit.lightning.callbacks.progress",
    "attnkit.lightning.files",
    "attnkit.lightning.modules.module",
    "attnkit.tasks.image_classification",
    "timm.models.helpers",
    "torch_geometric.nn.fx",
    "torch_geometric.nn.summary",
)

FORBIDDEN = {
    "exec", "import", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename",
    "os.mkdir", "os.rmdir", "os.putenv", "shutil.rmtree", "shutil.copyfile", "subprocess.Popen",
    "socket.connect", "socket.getaddrinfo", "urllib.Request", "pickle.find_class", "ctypes.dlopen",
    "marshal.loads", "marshal.load", "builtins.input", "webbrowser.open", "code.__new__",
}  # fmt: skip

seen: list[str] = []
watching = False


def watch(event: str, arguments: tuple) -> None:
    if not watching:
        return
    writes = event == "open" and any(mark in str(arguments[1]) for mark in "wax+")
    if event in FORBIDDEN or writes:
        seen.append(f"{event} {str(arguments)[:200]}")


def refused(action) -> bool:
    try:
        action()
    except UserError as error:
        return len(str(error).splitlines()) <= 3
    return False


def hidden(node: dict) -> list:
    """The same node in every place that is walked."""
    linear = {"_target_": "torch.nn.Linear", "in_features": 3}
    return [
        node,
        {**node, "_partial_": True},
        [{"deep": ({"er": node},)}],
        {"_target_": "torch.nn.Sequential", "_args_": [TENSOR, node]},
        {**linear, "out_features": node},
    ]


def main(folder: str) -> dict:
    global watching
    sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    for module in (*HOMES, *ALLOWED_MODULES):  # what is allowed may be imported
        with suppress(ModuleNotFoundError):
            import_module(module)
    for package in ("attnkit", *HOMES, *ALLOWED_MODULES):
        if package.startswith("attnkit") and "__getattr__" in vars(module := sys.modules[package]):
            for name in dir(module):  # whose names are imported when they are first used
                getattr(module, name)
    for node in (*NODES, *STRINGS):
        with suppress(UserError):
            build(node)
    before = set(sys.modules)
    sys.addaudithook(watch)
    watching = True
    passed = [
        str(node)
        for node in ({"_target_": target} for target in TARGETS)
        if not all(refused(lambda n=n: build(n, at="model")) for n in hidden(node))
    ]
    passed += [
        str(node) for node in NODES if not all(refused(lambda n=n: build(n)) for n in hidden(node))
    ]
    for node in STRINGS:
        with suppress(UserError):
            build(node)
    for target in TARGETS:
        with suppress(UserError):
            Consent().check({"vars": [{"_target_": target}]})
    found = list(seen)
    imported = sorted(set(sys.modules) - before)
    build({"_target_": "canary.Net"}, allow=["canary"])  # the watch sees what does happen
    watching = False
    return {
        "targets": len(set(TARGETS)),
        "nodes": len(NODES),
        "strings": len(STRINGS),
        "passed": passed,
        "seen": found,
        "imported": imported,
        "control": seen[len(found) :],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
