"""python -m fastweight.doctor: versions, devices, what serves what here, and a selftest on each device. Exit code 1 if something does not work."""

import importlib.metadata
import platform
import sys


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _selftest(device, torch):
    """Largest relative difference between the whole sequence at once and the same token by token, values and the gradient of q."""
    from fastweight.torch import forward

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 32, device=device) for _ in range(3))
    g, beta = -torch.rand(1, 70, 2, device=device), torch.rand(1, 70, 2, device=device)
    worst = 0.0
    for rule in ("gated_deltanet", "kda"):
        decay = g if rule == "gated_deltanet" else g[..., None].expand(1, 70, 2, 32)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the chunk form of each device
        found = []
        for form in ("auto", "token"):
            leaf = q.to(dtype).requires_grad_()
            o = forward(rule, leaf, k.to(dtype), v.to(dtype), g=decay, beta=beta, form=form).o.float()
            found.append((o.detach(), torch.autograd.grad(o.sum(), leaf)[0].float()))
        worst = max(worst, *(float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in zip(*found)))
    return worst


def main():
    import fastweight

    good = True
    print(f"python        {platform.python_version()} on {platform.platform()}")
    try:
        print(f"fastweight    {fastweight.version()}, {fastweight.find_library()}")
        print(f"cpu           {fastweight.simd_target()}")
    except ImportError as error:
        print(f"fastweight    {error}")
        return 1
    for name in ("torch", "triton", "fla-core", "flash-linear-attention", "transformers", "vllm", "sglang"):
        print(f"{name:13} {_version(name)}")
    try:
        import torch
    except ImportError:
        print("fastweight.torch needs torch >= 2.6")
        return 1
    devices = ["cpu"]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            print(f"gpu {i}         {p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB")
    try:
        fastweight.check("cuda")
        devices += ["cuda"]
    except fastweight.DeviceError as error:
        print(f"cuda          {error}")
    for device in devices:
        try:
            error = _selftest(device, torch)
            passed = error < (1e-5 if device == "cpu" else 1e-2)
            print(f"selftest      {device}: {'passed' if passed else 'FAILED'}, chunks against tokens {error:.1e}")
        except Exception as error:
            passed = False
            print(f"selftest      {device}: FAILED, {error}")
        good = good and passed
    if "not installed" not in _version("fla-core"):
        try:
            import fastweight.fla

            fastweight.fla.enable()
            print(fastweight.fla.status())
            fastweight.fla.disable()
        except Exception as error:
            print(f"fla           cannot be imported here: {error}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
