"""The environment that tells a job which cards are its own.

Owns the variables of design section 4 and the choice between indices and uuids. Pure: cards come in as seen.
Indices are computed at launch from uuids, because after a card is lost and the driver reloaded they shift; they are
the default because some programs (vLLM, Ray for a time) fail on uuids in CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from typing import Dict, List, Mapping

from cotenant.hostd.cards import Sighting
from cotenant.hostd.protocol import StartSpec


def launch_environment(spec: StartSpec, cards: Mapping[str, Sighting], home: Mapping[str, str]) -> Dict[str, str]:
    """What hostd adds last, over everything the job asked for.

    `cards` holds every gpu of the spec's slots; `home` names hostd's own directories, by which a later hostd knows whose
    a process is.
    """
    uuids: List[str] = []
    for slot in spec.slots:
        if slot.uuid != "cpu" and slot.uuid not in uuids:
            uuids.append(slot.uuid)
    # A simulated card has no number that CUDA may have: on a machine with real ones 0 would be a real card.
    simulated = any(cards[uuid].simulated for uuid in uuids)
    # CUDA takes MIG instances by uuid alone, and one list cannot mix both ways.
    by_uuid = any(cards[uuid].mig_parent for uuid in uuids) or spec.visible_by == "uuid"
    visible = [] if simulated else uuids if by_uuid else [str(cards[uuid].index) for uuid in uuids]
    saving = {} if spec.checkpoint is None else {"COTENANT_CHECKPOINT_DIR": spec.checkpoint.dir}
    if spec.resume_path is not None:
        saving["COTENANT_RESUME_FROM"] = spec.resume_path
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "COTENANT_GPU_UUIDS": ",".join(uuids),
        "COTENANT_GPUS": str(len(uuids)),  # of a job that asked for {min,max}: how many it got
        "COTENANT_LEASE": spec.lease_id,
        "COTENANT_FENCE": str(spec.fence),
        "COTENANT_JOB": spec.job_id,
        "COTENANT_ATTEMPT": spec.attempt_id,
        "COTENANT_EPOCH": str(spec.epoch),
        **saving,
        **home,
    }
