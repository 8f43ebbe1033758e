"""
A denied program behind programs that start others: what is denied, what is asked about, and what stays allowed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Answer, Engine, Question, tool
from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.permissions import Policy, PolicyDecision, Request, Rule
from stepengine.testing import ScriptedModel, text, tool_call

RUNS = ToolSpec("run_terminal_command", category="execute")
DENY = Rule.deny_command(["git", "push"])
POLICY = Policy([DENY, Rule.allow_tool("run_terminal_command")])


def check(command: str | list[str], policy: Policy = POLICY) -> PolicyDecision:
    return policy.check(Request(tool=RUNS, input=freeze_object({"command": command})))


RUNNING = [
    "git push", "GIT push", "env git push", "env -S 'git push'", "env -S'git push'", "env -iS 'PATH=BIN git push'", "env --split-string='git push'",
    "env --split-string 'git push'", "env --sp 'git push'", "env -S 'git\\_push'", "env -S 'g\"i\"t push'", "env -S git push", "/usr/bin/env -u X A=1 git push",
    "env -S \"env -S 'git push'\"", "env -C . git push", "prlimit git push", "prlimit --nofile=64 git push", "prlimit -n64 -- git push", "linux64 git push", "linux64 -R git push",
    "setarch x86_64 git push", "setarch -R git push", "x86_64 git push", "choom -n 0 -- git push", "choom --adjust=0 git push", "logsave log git push",
    "logsave -a log git push", "LOADER BIN/elf/git push", "LOADER --argv0 x BIN/elf/git push", "LOADER --library-path /lib BIN/elf/git push", "rbash -c 'git push'",
    "bash -c 'g\"\"it push'", "bash -ec 'git push'", "bash -o pipefail -c 'git push'", "sh -c 'eval \"g\"\"it push\"'", "sh -c '\"$@\"' x git push", "sh -c '$0 $1' git push", "capsh -- -c 'git push'",
    "timeout 5 git push", "timeout -k 1 -s TERM 5 git push", "timeout --signal=TERM 5 nice -n 3 git push", "nice git push", "nice -5 git push", "nohup git push", "stdbuf -oL git push",
    "stdbuf --output L git push", "setsid -w git push", "ionice -c 3 git push", "chrt -i 0 git push", "taskset 1 git push", "taskset -c 0 git push", "flock lock git push",
    "flock -w 1 lock -c 'git push'", "flock lock env -S 'git push'", "setpriv --no-new-privs git push", "xargs -a words git",
    "xargs -a words -n 1 git", "xargs -a empty git push", "find . -maxdepth 0 -exec git push ';'", "find . -maxdepth 0 -execdir env git push '{}' +", "script -qc 'git push' out",
    "start-stop-daemon --start --exec BIN/git -- push", "make X='git push' all", "make --eval 'x: ; git push' x", "split --filter='git push' words", "tar --to-command='git push' -xf archive.tar", "tar -I 'git push' -tf archive.tar", "tar --checkpoint=1 --checkpoint-action=exec='git push' -tf archive.tar",
    "vim -es -c '!git push' -c q", "ssh-agent git push", "perl -e 'exec qw(git push)'", "awk 'BEGIN{system(\"git push\")}'", "sed -n '1e git push' words",
    "sed -n '1s/.*/git push/e' words", "gdb -batch -ex 'shell git push'", "ld.so BIN/elf/git push",
    "run-parts --arg=push --regex=git BIN", "awk -v a=1 -v c='git push' 'BEGIN{system(c)}'", "awk 'BEGIN{c=\"git push\"; print | (c \"\")}'", "sed -n '1egit push' words", "sed 'sxpushxgit pushxe' words",
    "sed -n '1~2e git push' words", "sed -n '\\,u,e git push' words", "bash -c '2>&- git push'", "bash -c 'X=git; env $X push'", "bash -c 'env $\"git\" push'", "bash -c \"env $'g\\x69t' push\"",
    "bash -c 'X=push; git $X'", "bash -c 'echo git push | sh -s a'", "bash -c 'echo git push | sh -'", "bash -c 'echo git push > x; sh ./x'",
    "bash -c 'function f { g\"\"it push; }; f'", "bash -c 'set -- a; for x do g\"\"it push; done'", "bash -c 'if [[ x ]] then g\"\"it push; fi'", "bash -c 'env bash <(echo git push)'", "bash -c 'python3 < <(echo \"import os; os.system(\\\"git push\\\")\")'",
    "bash -c 'echo git push > ./x; env sh x'", "find BIN/git -exec /{} push ';'", "perl -e 'open F, q(g).q(it push|); print <F>'", "perl -ne print 'g\"\"it push|'", "sed -n '            1            e git push' words",
    "sed -n '1,            1e git push' words", "python3 -m timeit -n1 -r1 -s 'import os' 'os.system(\"g\" \"it push\")'",
    "vim -es -c ':!git push' -c q", "vim -es -c 'silent! !git push' -c q", "vim -es -c 'r !git push' -c 'q!'", "bash -c 'echo git push | tee x; sh x'", "bash -c 'tee -a y <<< \"git push\"; bash ./y'",
    "bash -c 'echo git push | dd of=z; sh z'", "bash -c 'echo git push > a; cp a b; mv -f b c; sh c'", "bash -c 'echo git push | sed -n \"w s\"; sh s'",
    "bash -c 'python3 -c \"open(\\\"p\\\", \\\"w\\\").write(\\\"git push\\\")\"; sh p'",
    "bash -c 'echo git push | env tee t; chmod +x t; PATH=.:$PATH t'", "bash -c \"awk 'BEGIN{print \\\"git push\\\" > \\\"w\\\"}'; sh w\"",
]  # fmt: skip
"""Spellings that start the program on a machine that has their wrapper. ``BIN`` is the folder of the program, ``LOADER`` the dynamic loader."""
DENIED = [
    "hub push", "yadm push", "flatpak-spawn --host git push", "pwsh -Command 'git push'", "cmd /c git push", "bat --pager 'git push' f", "ag --pager='git push' x", "wget --use-askpass='git push' x",
    "uclampset -m 0 git push", "make SHELL='git push'", "tmux new 'git push'", "tmux new-session -d git push", "tmux -c 'git push'", "screen -dm git push", "su -c 'git push'", "su root -c 'git push'", "runuser -u root git push",
    "sudo -u root -- git push", "sudo env -S 'git push'", "doas git push", "pkexec --user root git push", "unshare -r git push", "nsenter -t 1 -m git push", "chroot / git push",
    "bwrap --bind / / git push", "firejail --quiet git push", "systemd-run --user git push", "strace -f -o out git push", "valgrind -q git push", "perf stat git push", "gdb --args git push",
    "busybox env git push", "busybox sh -c 'git push'", "toybox nice git push", "watch 'git push'", "watch -n 1 git push", "parallel git push ::: a", "entr -s 'git push'",
    "hyperfine 'git push'", "eval 'git push'", "eval 'g\"i\"t' push", "exec -a x git push", "command -p git push", "builtin command git push", "time -p git push", "coproc git push",
    "ssh localhost git push", "ssh -p 22 localhost 'git push'", "ssh -o ProxyCommand='git push' host", "rsync -e 'git push' a b:", "scp -o ProxyCommand='git push' a b:",
    "man -P 'git push' ls", "zip -T -TT 'git push' a b", "fd -x git push", "fd --exec git push ';'", "npx git push", "npx -c 'git push'", "npm exec -c 'git push'", "npm exec -- git push",
    "uv run git push", "uv run --with x -- git push", "uvx git push", "poetry run git push", "pipenv run git push", "bundle exec git push", "conda run -n x git push", "mise exec -- git push",
    "direnv exec . git push", "rustup run stable git push", "nix shell nixpkgs#git -c git push", "cmake -E env git push", "go run -exec 'git push' x.go", "faketime now git push",
    "fakeroot -- git push", "torsocks git push", "gosu root git push", "tini -- git push", "dumb-init git push", "envdir d git push", "setuidgid u git push", "gtimeout 5 git push",
    "genv git push", "qemu-x86_64 /usr/bin/git push", "/lib/ld-musl-x86_64.so.1 /usr/bin/git push", "ld-linux.so.2 git push", "arch -x86_64 git push", "caffeinate -i git push",
    "git -c alias.x=push x", "git -c alias.x='!git push' x", "git -c ALIAS.X=push x", "git -c alias.y=x -c alias.x='-C . push' x", "git -C a -c alias.x='push --force' x", "git-push", "/usr/lib/git-core/git-push -f",
    "git rebase -x 'git push' main", "git rebase --exec='git push' main", "git bisect run git push", "git submodule foreach git push", "git submodule --quiet foreach 'git push'",
    "git for-each-repo --config=x push", "git difftool -x 'git push'", "git grep -O'git push' x", "git clone -u 'git push' a b", "git fetch --upload-pack='git push' a", "git filter-branch --msg-filter 'git push'",
    "git fetch 'ext::git push'", 'g""it push; ls', "g\\it push; ls", "'git' push; ls", '"git" push && ls', "{git,push}; ls", "ls | env git push", "ls; env -S 'g\"i\"t push'", "x=git; $x push", "$(git push)",
    "`git push`", "cat <(git push)", "if true; then git push; fi", "f() { git push; }; f", "g\\\nit push; ls", "echo push | xargs git", "alias g=git; g push", "(cd x && git push)", "echo a\ngit push", "cat <<E\n$(git push)\nE",
    "vim '+!git push' f", "less '+!git push' f", "git merge-index git push", "git archive --remote='ext::git push' HEAD", "git config alias.x '!git push'", "git clone -c core.sshCommand='git push' a", "2>&- git push", "2>&- g''it push",
    "trap 'g\"\"it push' EXIT; ls", "f() { $1 push; }; f git", "case a in a) g''it push;; esac", "apt-get -o APT::Update::Pre-Invoke::='git push' update", "cat > x <<E\ngit push\nE\nsh x", "mapfile -C 'git push' a", "PS4='$(git push)' bash -x f",
    "ls; make X='git push'", "ls; sh -c \"sh -c 'git push'\"", 'ls; frobnicate "g"it push', "git\tpush", "env --  git  push", ["env", "git", "push"], ["sh", "-c", "git \\\n push"], ["env", "-S", "git push\n"],
    "stepengine cassette record x -- git push", "ctest --build-and-test a b --test-command git push", "coverage run -m git push", "hatch env run -- git push",
    "hatch run env:git push", "meson devenv -C b git push", "meson test --wrapper 'git push'", "tox -x testenv.commands='git push'",
    "aptitude -o DPkg::Pre-Invoke::='git push' update", "podman unshare git push", "yarn workspace a exec git push", "yarn workspaces foreach -A exec git push",
    "pnpm recursive exec -- git push", "pnpm -c exec 'git push'", "dotenv -f .env -- git push", "op plugin run -- git push", "pipenv shell -c 'git push'",
    "brew ruby -e 'exec %w(git push)'", "nix env shell nixpkgs#git -c git push", "cargo +nightly watch -s 'git push'", "dotnet build -p:PostBuildEvent='git push'",
    "dotnet build /p:PostBuildEvent='git push'", "git subtree push --prefix x o b", "git remote-ext x 'git push'", "tar cIf 'git push' a.tar x",
    "wget -e use_askpass='git push' x", "go test -exec='git push' x", "go list -toolexec 'git push' x", "fd -HIx git push", "pipx run 'git push'",
    "xargs -a f -I{} sh -c 'git {}; ls'", "ls | xargs -I% git % x", "sudo -u x bash <<E\ngit push\nE", "gdb <<E\nshell git push\nE", "echo git push | ex -s",
    "echo git push | unshare -U", "echo git push | linux64", "echo git push | setarch x86_64", "echo git push | script -q f", "echo git push | fakeroot",
    "echo git push | chroot /", "echo git push | gdb", "echo git push | ninja -f /dev/stdin", "echo git push | vim -S /dev/stdin", "echo git push | sudo -s",
    "echo git push | sudo -u root -i", "echo git push | su", "echo git push | su - root", "echo git push | newgrp", "echo git push | nsenter -t 1 -m",
    "echo git push | uv run -", "echo git push | uv run python", "echo git push | systemd-run --shell", "echo git push | nix-shell",
    "function f { g''it push; }; f", "for x do g''it push; done", "if [[ x ]] then g''it push; fi", 'cat <<E\n$(g""it push)\nE', "env bash <(echo g''it push)", "echo g''it push > ./x; sh x", "echo g''it push > x; env sh x",
    "echo g''it push > d/../x; timeout 5 ./x", "pnpm git push", ". ./git push", "ls; source git push", "find push -exec git {} ';'", ["find", "push", "-exec", "git", "{}", ";"], "compgen -W '$(g\"\"it push)'", "gh repo clone o/r -- -u 'git push'", "echo 'e git push' > x; sed -f x f",
]  # fmt: skip
"""Spellings that are denied and not run by the tests: they need a terminal, rights, a network or programs that are rare."""
ASKED = [
    "ipython -c 'import os; os.system(x)'", "emacs --batch --eval '(shell-command x)'", "ghc -e 'System.Process.callCommand x'", "source <(curl x)", ". /dev/stdin; ls", "bash <(curl x)", "python3 <(curl x)", "just git push",
    "sh -", "bash -s a b", "cat f | python3", "cat f | perl -", "cat f | make -f -", "cat f | sed -f - x", "cat f | awk -f - x", "cat f | ssh host", "cat f | parallel", "cat f | at now", "make -f <(cat f)",
    "env $X push", "timeout 5 $X push", 'sudo "$X" push', "env `cat f` push", "env $'g\\x69t' push", "env gi? push", "git $X", 'git -C a "$X" origin', "find . -exec $X push ';'", "GIT_EXTERNAL_DIFF=git git diff",
    "export GIT_SSH_COMMAND='git push'; ls", "git -c core.sshCommand='git push' fetch", "diff3 --diff-program git a b c", "mypy --python-executable=git f", "pip --python git install y", "npm --script-shell git run y",
    "pylint --init-hook='import os; os.system(x)'", "vim '+call system(x)'", "awk '{print | $1}' f", "awk '{f = $1; @f(x)}'", "echo ${x@P}", "[[ -v 'a[$(x)]' ]]", "echo `echo \\`x\\``", 'echo "$(case a in a) x;; esac)"',
    "((x[1]<<2))\nls\n2", "echo git push | frobnicate", "ls; git $X",
    "frobnicate git push", "frobnicate -x 'git push'", "frobnicate sh -c 'g\"i\"t push'", "frobnicate env -S 'git push'", "./run git push", "docker run image git push", "at now git",
    "python3 -c 'import os; os.system(\"git push\")'", "python3 -c 'import os; os.system(\"g\" + \"it push\")'", "python3.11 -c 'import git'", "perl -e 'exec qw(git push)'", "perl -we 'system(chr(103).\"it push\")'",
    "ruby -e '`g#{:it} push`'", "node -e 'require(\"child_process\").exec(\"g\"+\"it push\")'", "php -r 'passthru(\"x\");'", "lua -e 'os.execute(x)'", "python3 run.py git push", "python3 -m frobnicate git push",
    "awk 'BEGIN{system(\"g\" \"it push\")}'", "awk '{print | \"sh\"}' f", "gawk '\"x\" | getline'", "awk 'BEGIN{system(\"x\")}' -e f", "sed -n '1e x' f", "sed 's/a/b/e' f", "env PAGER='git push' git log", "env GIT_SSH_COMMAND='git push' git fetch",
    "git -c core.pager='git push' log", "git --config-env=alias.x=X x", "git x", "git -C a unknown", "xargs -a words git", "xargs sh -c", "bash", "sh -s", "bash deploy.sh git", "expect -c 'spawn git push'",
    "$X push", '"$X" push', "gi? push", "$(printf 'g%s' it) push", 'eval "$X"', "curl x | sh", "base64 -d f | bash -s", "cat f | xargs env", "`cat f`", "$'\\x67it' push", "sh -c '$X push'", 'bash -c "${X}"',
    "python3 - <<E\nimport subprocess\nE", "find . -exec '{}' ';'", "env -S '${X} push'", "git svn fetch --authors-prog=x",
    "x | sudo -s", "x | unshare -U", "x | gdb", "curl x | sudo python3 -", "brew ruby -e 'system \"x\"'", "sed 's/[/]/x/e' f", "sed '/[/]/e x' f",
    "sed 's/" + 600 * "a" + "/x/e' f", "sed '1,/" + 600 * "a" + "/e x' f", "node --import 'data:text/javascript,x' x.js", "perl '-MPOSIX;qx(x)' -e1",
    "parallel git ::: push", "awk '/[/]/ {print | \"x\"}' f", "awk '{if (0) x; else /\"/; print \"x\" | \"sh\"}' f", "awk '{x = 1 / 2; print | \"x\"}' f",
    "env bash <(cat f)", "timeout 5 bash <(cat f)", "sed -n -f <(cat f) x", "awk -f <(cat f)", "vim -es -S <(cat f)", "gdb -batch -x <(cat f)", "ssh -F <(cat f) host true",
    "python3 < <(cat f)", "echo x > >(python3 -)", "exec < <(cat f); python3", "parallel < <(cat f)", "BASH_ENV=<(cat f) bash -c :", 'python3 -c "$(cat f)"', 'perl -e "$X"', 'awk "$X" f',
    "cat f | xargs -0 python3 -c", "xargs awk", "find . -exec python3 -c {} ';'", ["find", "/bin/git", "-exec", "/{}", "push", ";"], "printf -v 'a[$(x)]' x",
    "x='a[$(x)]'; echo $((x))", "read x <<< 'a[$(x)]'; echo $((x))", "read x <<'E'\na[$(x)]\nE\necho $((x))", "cat > x.py <<'E'\nimport os\nos.system('g' 'it push')\nE\npython3 x.py",
    "perl -e 'open F, \"g\".\"it push|\"'", "perl -ne print 'g\"\"it push|'", "python3 -m timeit -s 'import os' 'os.system(x)'", "node -pe 'require(\"child_process\").execSync(x)'", "php --run 'system(x);'",
    "php -r 'pcntl_exec(x);'", "Rscript -e 'system2(x)'", "julia -e 'run(Cmd([x]))'", "elixir -e 'System.cmd(x, [])'", "erl -eval 'os:cmd(x).'", "groovy -e '(\"g\"+\"it\").execute()'", "ruby -e 'Open3.capture2(x)'",
    "deno repl --eval 'new Deno.Command(x)'", "emacs --batch --eval '(call-process x)'", "sbcl --eval '(sb-ext:run-program x)'", "cat f | deno run -", "alias g='g\"\"it push'\ng", "PAGER='git push'; export PAGER; man x",
    "set -a; PAGER='git push'; man x", "git unknown sh -c 'git pu\"\"sh'", "python3 -m frobnicate -c x git push",
]  # fmt: skip
"""Commands of which nobody can say that they do not start the program."""
PLAIN = [
    "rg git", "rg -n 'git push' docs", "grep push file", "grep -rn 'git push' docs", "pytest", "pytest -k git", "python -m pytest -k git", "python -umpytest -k git", "python -um pytest -k git", "python -Impytest", "python3.11 -m pytest tests/git", "npm test", "npm run git", "make", "make git-push",
    "make git", "git status", "git log -5", "git log --grep push", "git commit -m 'git push: fix'", "git stash push", "git -C x log", "git -c core.pager=cat log", "git checkout -b push", "git clone https://github.com/git/git",
    "python x.py", "python -c 'print(1)'", "python -c 'import json, sys; print(json.load(sys.stdin))'", "node build.js", "find . -name git", "find . -name '*.py' -exec wc -l '{}' +", "sed -i 's/git push/hg push/' README.md", "sed -n '/the/p' f",
    "awk '/git|push/ {print $2}' f", "timeout 5 grep -r git f", "env A=1 pytest", "sudo ls git", "ls git push", "cat git", "echo git push", "uv run pytest -k git", "poetry run mypy git", "cargo test git", "xargs -a f grep git", "vim git",
    "watch git status", "bash build.sh", "frobnicate --x '*.py' src", "ruff check git", "time pytest", "go test ./...", "tar xf git.tar", "mkdir -p git/push", "command -v git", "which git", "sort git", "nice git log", "sh -c 'git status'",
    'for f in *.py; do cat "$f"; done', "cd x && pytest -q 2>&1 | tail -5", "ls *.py | xargs wc -l", "export A=1; make", "if [ -f x ]; then pytest; fi", 'while read f; do echo "$f"; done < list', "x=$(date); echo $((1 + 2 * 3))",
    "case $x in a*) ls;; esac", "python - <<E\nprint(1)\nE", "cat <<'E' > f\n$X push `y`\nE",
    "find . -name '*.py' -exec git add {} ';'", "find . -exec awk '{print}' {} +", "MSG='git push'; echo \"$MSG\"", "sed 's/a/b/' <(sort f)", "diff <(sort a) <(sort b)", "pnpm install", "pnpm run build", '. "$HOME/.cargo/env" && cargo build', "source venv/bin/activate; pytest", "python -c 'print(open(\"f\").read())'",
    "git status | tee log; cat log", "pytest | tee log; python3 run.py", "cp a.sh b.sh; sh b.sh", "git status; python3 -c 'print(open(\"f.txt\").read())'; python3 run.py f.txt", "sed -n 1p run.sh; sh run.sh", "vim -es -c 'w! out.txt' -c 'q!' f",
    "for x in a b; do echo $x; done", "if [[ -f x ]]; then pytest; fi", "function f { pytest; }; f", "ls 2>&1 > out.txt; python3 run.py 1 2>&1", "seq 3 | xargs -I{} sed -n '{}p' f", "node -p '1 + 1'", "python -m timeit '1 + 1'",
]  # fmt: skip


@pytest.mark.spec("reliability:PM08", "reliability:PM01", "reliability:R7")
def test_a_deny_finds_its_program_behind_wrappers() -> None:
    assert [] == [command for command in DENIED if check(command).decision != "deny"]


@pytest.mark.spec("reliability:PM08", "reliability:PM52")
def test_a_command_that_may_run_a_denied_program_asks() -> None:
    modes = {mode: Policy(POLICY.rules, mode) for mode in ("dont_ask", "bypass")}
    for command in ASKED:
        found = check(command)

        assert ("ask", DENY) == (found.decision, found.rule), command
        assert DENY.id in found.message
        decided = {mode: check(command, policy).decision for mode, policy in modes.items()}
        assert {"dont_ask": "deny", "bypass": "allow"} == decided, command


@pytest.mark.spec("reliability:PM52")
def test_ordinary_work_is_not_asked_about_beside_a_deny() -> None:
    assert [] == [command for command in PLAIN if check(command).decision != "allow"]


@pytest.mark.spec("reliability:PM52")
def test_a_rule_for_the_program_settles_the_doubt() -> None:
    asked = Rule.ask_for_command(["git", "push"])
    named = Rule.allow_command("frobnicate")

    assert "allow" == check("frobnicate git push", Policy([DENY, named])).decision
    assert "ask" == check("frobnicate git push", Policy([asked, Rule.allow_tool("*")])).decision
    assert "allow" == check("frobnicate git push", Policy([Rule.allow_tool("*"), asked])).decision
    assert "allow" == check("frobnicate git push", Policy([Rule.allow_tool("*")])).decision
    assert "deny" == check("env git push", Policy([DENY, Rule.allow_command("env")])).decision


class Person:
    """
    A person who agrees to the first question with *covers*, and to no other.
    """

    def __init__(self, covers: str) -> None:
        self.covers = covers
        self.asked: list[Question] = []

    def ask(self, question: Question) -> Answer | bool:
        self.asked.append(question)
        return Answer(remember="session", covers=self.covers) if len(self.asked) == 1 else False


@pytest.mark.spec("reliability:PM52", "requirements:X71")
def test_an_approval_of_any_input_covers_no_doubtful_command() -> None:
    ran = []

    @tool(category="execute")
    def sh(command: str) -> str:
        """
        Run.
        """
        ran.append(command)
        return "ran"

    commands = ["make", "frobnicate", "frobnicate git push", "env git push", "make x"]
    model = ScriptedModel([*[tool_call("sh", {"command": command}) for command in commands], text("ok")])
    person = Person("allow any calls of sh by worker in user")
    agent = AgentDefinition("worker", model="m/m", tools=[sh])
    with Engine([agent], models=model, permissions=Policy([DENY]), interactor=person) as engine:
        engine.run_sync("worker", "Go.").unwrap()

    assert ["make", "frobnicate", "make x"] == ran
    assert ["make", "frobnicate git push"] == [question.details["command"] for question in person.asked]
    assert [1, 0] == [len(question.wider) for question in person.asked]


WRAPS = [
    ["env"], ["env", "-i"], ["env", "A=1", "-u", "B"], ["sudo", "-u", "root"], ["timeout", "-k", "1", "5"], ["nice", "-n", "3"], ["nohup"], ["prlimit", "--nofile=9"], ["choom", "-n", "0", "--"],
    ["setarch", "x86_64", "-R"], ["linux64"], ["logsave", "f"], ["/lib64/ld-linux-x86-64.so.2", "--argv0", "x"], ["flock", "f"], ["chrt", "-i", "0"], ["taskset", "-c", "0"], ["stdbuf", "-oL"], ["strace", "-f"],
    ["bwrap", "--bind", "/", "/"], ["busybox"], ["uv", "run"], ["npx", "-y"], ["tmux", "new"], ["/USR/BIN/ENV"], ["ionice", "-c3"], ["xargs", "-n1"], ["setsid", "--fork"], ["find", ".", "-exec"],
]  # fmt: skip
LINES = [
    ["sh", "-c"],
    ["bash", "-lc"],
    ["env", "-S"],
    ["su", "-c"],
    ["flock", "f", "-c"],
    ["script", "-qc"],
    ["npx", "-c"],
    ["watch"],
    ["ssh", "host"],
    ["tmux", "new"],
    ["rbash", "-c"],
    ["eval"],
]
GITS = [["git", "push"], ["/usr/bin/git", "push", "-f"], ["GIT", "-C", "x", "push"], ["git-push"]]


@pytest.mark.spec("reliability:PM08")
@given(st.lists(st.sampled_from([*WRAPS, *LINES]), max_size=4), st.sampled_from(GITS))
def test_wrappers_in_wrappers_hide_no_program(around: list[list[str]], words: list[str]) -> None:
    for wrapper in around:
        words = [*wrapper, shlex.join(words)] if wrapper in LINES else [*wrapper, *words]

    assert "deny" == check(words).decision
    assert "deny" == check(f"ls; {shlex.join(words)}").decision


@pytest.mark.spec("reliability:PM52")
@given(st.lists(st.sampled_from([w for w in WRAPS if w[0] not in {"xargs", "find", "bwrap", "tmux"}]), max_size=4))
def test_wrappers_of_harmless_commands_stay_allowed(around: list[list[str]]) -> None:
    words = [word for wrapper in around for word in wrapper]

    assert "allow" == check([*words, "grep", "-r", "git", "push"]).decision


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """
    Return a folder with a ``git`` that notes its arguments, in a project with the files that the spellings name.

    A loader takes no script, so for that there is a program which makes a file with the name of its argument.
    """
    made = tmp_path / "bin"
    (made / "elf").mkdir(parents=True)
    for name in ("git", "GIT"):
        (made / name).write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/noted\n')
        (made / name).chmod(0o755)
    shutil.copy(shutil.which("touch") or "/bin/touch", made / "elf" / "git")
    (tmp_path / "words").write_text("push\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "makefile").write_text("all:\n\t$(X)\n")
    with tarfile.open(tmp_path / "archive.tar", "w") as archive:
        archive.add(tmp_path / "words", "words")
    return made


def find_loader() -> str:
    return str(next(iter([*Path("/lib64").glob("ld-linux*.so*"), *Path("/lib").glob("ld-*.so*")]), "/lib/ld.so"))


def has_pushed(command: str, programs: Path, folder: Path) -> bool:
    """
    Run a command and return whether it started the program to push.
    """
    path = os.pathsep.join([str(programs), os.environ["PATH"], "/usr/sbin", "/sbin"])
    environment = {"PATH": path, "HOME": str(folder), "SHELL": "/bin/sh", "TERM": "dumb"}
    words = [shutil.which(shlex.split(command)[0], path=path) or "", *shlex.split(command)[1:]]
    subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    noted = folder / "noted"
    return (folder / "push").exists() or (noted.exists() and "push" in noted.read_text().split())


@pytest.mark.spec("reliability:PM08", "reliability:PM52")
@pytest.mark.parametrize("command", RUNNING)
def test_a_spelling_that_starts_the_program_is_found(command: str, programs: Path, tmp_path: Path) -> None:
    """
    Each is run where its wrapper is installed, so that the table is about what programs do and not about what they should.
    """
    text = command.replace("LOADER", find_loader()).replace("BIN", str(programs))

    assert check(text).decision in {"deny", "ask"}
    if shutil.which(shlex.split(text)[0], path=f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("its wrapper is not installed")
    assert has_pushed(text, programs, tmp_path)


PIECES = [
    "git", "push", "git push", "g", "it", "'", '"', "\\", " ", " ", " ", ";", "$X", "${X}", "$(", "echo git", "echo push", ")", "`", "{", "}", ",", "&&", "|", "env ", "sh -c ", "bash -c ", "eval ", "-S ", "\n",
    "# ", "xargs ", "<<E\n", "E\n", "nice ", "command ", "exec ", "if true; then ", "fi", "(", "!", "A=1 ", "X=push ", "$'", "timeout 5 ", "\\\n", "-- ", "case a in a) ", ";; esac", "f() { ", "}; f", "printf git", "gi?", "2>&- ", "<<-E\n", "\tE\n", "((", "))", "[[ ", "]]", "@(", "|| ",
    "g''it push", "${X:-", "\\`", "$'g\\x69t' push", "coproc ", "function f ", "trap ", "git $P", "nice $X ", "P=push;", "echo git push > s; ", "sh s", "| sh -s a", "a[$(git push)]",
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:PM08", "reliability:PM52")
@pytest.mark.skipif(shutil.which("bash") is None, reason="runs bash")
def test_no_allowed_random_script_runs_the_denied_program(programs: Path, tmp_path: Path) -> None:
    """
    Pieces of scripts are put together at random. All that are allowed are run, and others until one pushes.
    """
    random, pushed = Random(3), list[str]()
    for _ in range(200):
        script = "".join([random.choice(PIECES) for _ in range(random.randint(2, 7))])
        found = check(script)
        assert "failed:" not in found.why
        if pushed and found.decision != "allow":
            continue
        (tmp_path / "noted").unlink(missing_ok=True)
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "X": "git", "P": "push"}
        subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        noted = tmp_path / "noted"
        if noted.exists() and "push" in noted.read_text().split():
            pushed.append(script)
    assert pushed
    assert [] == [script for script in pushed if check(script).decision == "allow"]


@given(
    st.one_of(
        st.text("git pushenv-Sc'\"\\$(){}<>|&;=\n`", max_size=60),
        st.lists(st.sampled_from([*PIECES, "", "-", "--", "{}", "=", "@", "+x"]), max_size=9).map(" ".join),
    )
)
def test_a_judgement_of_any_text_ends_with_a_decision(command: str) -> None:
    assert "failed:" not in check(command).why
    words = [word for word in command.split(" ") if word] or ["x"]
    assert "failed:" not in check(words).why
