"""An agent that is asked in plain words finds the tool: everyday requests, English and Chinese."""

from __future__ import annotations

import pytest
from bm25 import Ranker, translated, words

from cotenant import tools

ENGLISH = (
    ("How many GPUs may I use right now?", "quota_status"),
    ("What is my quota, and how much of it is left?", "quota_status"),
    ("Which cards are free at the moment?", "list_gpus"),
    ("Who is using GPU 3, and how much memory is taken on it?", "list_gpus"),
    ("What GPU models do we have here?", "list_gpus"),
    ("I want to debug in my own shell, reserve a card for me", "acquire_lease"),
    ("Get me two GPUs for an hour; I start the work myself", "acquire_lease"),
    ("My lease is about to expire, keep it alive", "heartbeat"),
    ("I am done with the cards, give them back", "release_lease"),
    ("Which leases do I still hold?", "list_leases"),
    ("Who holds cards, and until when?", "list_leases"),
    ("Pass my lease to another agent", "hand_over"),
    ("Start a training run with train.py on one GPU, detached", "submit_job"),
    ("Run this evaluation command on 4 cards, queue it if nothing is free", "submit_job"),
    ("Why is my job still waiting?", "explain_job"),
    ("Explain what blocks my job and what would help it start", "explain_job"),
    ("Show me everything about job 17: host, attempts, time left", "get_job"),
    ("What exit code did this job end with, and why did it fail?", "get_job"),
    ("Show me all my jobs that failed", "list_jobs"),
    ("What jobs are running right now?", "list_jobs"),
    ("Tell me when the training job has ended", "wait_job"),
    ("Wait until my queued lease is granted", "wait_job"),
    ("Show the last lines of the training's output", "tail_logs"),
    ("Is there a traceback in the log?", "tail_logs"),
    ("Stop that job for good, I do not want it any more", "cancel_job"),
    ("Run the failed job again with the same settings", "retry_job"),
    ("Raise the priority of my waiting job", "modify_job"),
    ("My queued job needs only one GPU and six hours, change that", "modify_job"),
    ("Pause the running training and keep its cards", "hold_job"),
    ("Continue the suspended job", "release_job"),
    ("Make the running job save a checkpoint now", "checkpoint_job"),
    ("Send USR2 to the processes of my running job", "signal_job"),
    ("Keep my waiting job from starting for now", "hold_job"),
    ("Let the job I put on hold go on", "release_job"),
    ("Who is in front of me in the waiting line?", "list_queues"),
    ("When will my queued job start, roughly?", "estimate_wait"),
    ("Give me a forecast: how long would a job with four GPUs wait?", "estimate_wait"),
    ("Suggest how much memory and how many hours my run needs, from past runs", "suggest_resources"),
    ("What should I ask for, going by like runs that ended?", "suggest_resources"),
    ("Do all machines answer, and which driver do they have?", "list_hosts"),
    ("What happened last night, and who did it?", "list_events"),
)
CHINESE = (
    ("我现在可以用几张显卡？", "quota_status"),
    ("我的配额还剩多少？", "quota_status"),
    ("现在哪些卡是空闲的？", "list_gpus"),
    ("0号显卡的显存用了多少，温度多少？", "list_gpus"),
    ("我想在自己的终端里调试，帮我占一张卡", "acquire_lease"),
    ("申请两张卡，我自己跑", "acquire_lease"),
    ("我的租约快到期了，续一下", "heartbeat"),
    ("卡用完了，还回去", "release_lease"),
    ("我手上还有哪些租约没有释放？", "list_leases"),
    ("把这个租约转交给另一个代理", "hand_over"),
    ("在后台提交一个训练任务，用一张卡", "submit_job"),
    ("先试运行一下这个命令，看看能不能提交", "submit_job"),
    ("为什么我的任务还在排队？", "explain_job"),
    ("解释一下任务为什么还没启动，怎样才能启动？", "explain_job"),
    ("这个任务的退出码是多少，失败原因是什么？", "get_job"),
    ("列出我失败的任务", "list_jobs"),
    ("现在有哪些任务在运行？", "list_jobs"),
    ("等训练任务结束了告诉我", "wait_job"),
    ("等我排队的租约批下来", "wait_job"),
    ("看看训练日志的最后几行", "tail_logs"),
    ("标准错误里有没有报错？", "tail_logs"),
    ("把那个任务停掉，不要了", "cancel_job"),
    ("取消排队中的任务", "cancel_job"),
    ("失败的任务再跑一次", "retry_job"),
    ("把排队任务的优先级调高", "modify_job"),
    ("把任务的时间限制改成六小时", "modify_job"),
    ("冻结正在运行的任务，显卡先留着", "hold_job"),
    ("让冻结的任务继续跑", "release_job"),
    ("让正在运行的任务现在保存检查点", "checkpoint_job"),
    ("给正在运行的任务发个信号", "signal_job"),
    ("先别让我排队的任务启动", "hold_job"),
    ("让挂起的任务继续", "release_job"),
    ("队列里我前面还有谁？", "list_queues"),
    ("哪台机器掉线了，驱动是什么版本？", "list_hosts"),
    ("还有谁在线，和我共用这些机器？", "list_agents"),
    ("昨天晚上发生了什么事件？", "list_events"),
    ("预计我的任务什么时候能开始？", "estimate_wait"),
    ("根据以前的运行，建议我申请多少显存和多少小时？", "suggest_resources"),
)


@pytest.mark.parametrize("requests", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_plain_words_find_the_tool(requests: tuple[tuple[str, str], ...]) -> None:
    """Of all requests at least nine in ten have the right tool among the first two."""
    rank = Ranker(tools.ALL)
    missed = [(asked, tool, rank(asked)[:3]) for asked, tool in requests if tool not in rank(asked)[:2]]
    assert len(requests) >= 30
    assert len(missed) <= len(requests) // 10, "\n".join(map(str, missed))


def test_every_tool_is_asked_for() -> None:
    assert {tool for _, tool in (*ENGLISH, *CHINESE)} == {tool.name for tool in tools.ALL}


def test_the_ranker_is_no_oracle() -> None:
    """Words that no tool has decide nothing, and a request of one tool's own words finds it."""
    rank = Ranker(tools.ALL)
    assert rank("zebra umbrella") == sorted(tool.name for tool in tools.ALL)
    for tool in tools.ALL:
        assert rank(tool.description)[0] == tool.name


def test_words_are_cut_alike() -> None:
    assert words("Running jobs, waits; the lease's leases") == ["run", "job", "wait", "leas", "leas"]
    assert translated("取消 job_1 的任务").split() == ["cancel", "job_1", "job"]
