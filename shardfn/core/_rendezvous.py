"""How ranks that torchrun has started again meet, in a store that remembers earlier ranks.

torchrun's agent keeps one store for all rounds of a job. Entries of ranks that have ended (addresses, for example)
would be taken for entries of their successors: https://github.com/pytorch/pytorch/issues/135712. So the ranks of each
round find a name that no other round has, and keep everything below the name.

    rank r: here/r = a random word      rank 0: answers each word that it finds with its own, which is the name
            waits for the answer                until all ranks confirm that they have it

A word of an earlier round may be answered, too. Such an answer is not read.
"""

import datetime
import os
import secrets
import time

import torch.distributed as dist

_PERIOD = 0.05


def start_group(backend: str, timeout: datetime.timedelta | None) -> None:
    """Starts torch.distributed from the launcher's environment variables, in any round of the job.

    Raises:
        RuntimeError: ranks did not come in time. The message names the ranks.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=limit)
    own = dist.PrefixStore(round_name(store, rank, world, limit.total_seconds()), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)


def round_name(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """Returns a name that the living ranks of a store have in common, and no earlier round has used.

    Args:
        store: store, perhaps already used by ranks that have ended.
        rank: rank of this process.
        world: the number of ranks.
        seconds: seconds to wait for the other ranks.

    Raises:
        RuntimeError: some ranks did not come.
    """
    word, at = secrets.token_hex(8), "shardfn/round"
    if rank:
        store.set(f"{at}/here/{rank}", word)
        store.wait([f"{at}/answer/{word}"], datetime.timedelta(seconds=seconds))
        name = store.get(f"{at}/answer/{word}").decode()
        store.set(f"{at}/has/{name}/{rank}", "1")
        return f"{at}/{name}"
    missing, answered, end = set(range(1, world)), set[bytes](), time.monotonic() + seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"{at}/here/{other}"]) and (found := store.get(f"{at}/here/{other}")) not in answered:
                answered.add(found)
                store.set(f"{at}/answer/{found.decode()}", word)
            if store.check([f"{at}/has/{word}/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} did not come within {seconds:g} s.")
        time.sleep(_PERIOD if missing else 0)
    return f"{at}/{word}"
