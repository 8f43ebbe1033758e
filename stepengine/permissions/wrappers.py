"""
The commands started by another command: a table of wrapper programs, and the syntax of their arguments.

``find_started_commands`` derives every command of an argument list or script from its words. Commands are found behind ``env`` and
``timeout``, in the line of ``sh -c``, in an alias of ``git -c``, and in each simple command of a script. An unknown option is
read in both ways: with a value in the next word, and without one. Unknown programs are reported as possible or unclear.
Files are not read: permission for ``make`` or ``pytest`` includes the commands in the files of the project.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import takewhile
from typing import Literal, NamedTuple

from attrs import frozen

from stepengine.permissions.script_commands import (
    EXPANSION,
    INDEX,
    PARAMETER,
    WORD,
    ParsedScript,
    SimpleCommand,
    split_script,
)
from stepengine.workspace.argv import ASSIGNMENT, COMMAND_WORDS, Argv, Script, split_argv

Rest = Literal["command", "open", "line", "shell", "anywhere", "elsewhere", "none"]

MAX_COPIES = 8
"""The commands derived from one command may be this many times as long in total, so that the time is linear."""
MIN_DERIVED_CHARS = 200_000
"""The commands derived from a short command may have this many characters in total, more than realistic wrappers need."""
MAX_WRAPPERS = 32
"""The most nested commands that may read the same input; no person writes more than a few."""
MIN_CHARS = 10
"""The least size that a derived command counts."""
CACHED = 16
"""Every rule about commands checks the same call; a command has at most 128 KiB."""


@frozen
class StartedCommands:
    """
    The commands that a command starts.

    Attributes:
        commands: The command itself, and all commands behind its wrappers. For a script with only known commands, just these.
        possible: Commands and texts that it may run: the program before them is unknown.
        unclear: Why it may run programs that no word names; ``""`` if it cannot, apart from the content of files.
    """

    commands: tuple[Argv | Script, ...]
    possible: tuple[Argv | Script, ...] = ()
    unclear: str = ""


@frozen
class Wrapper:
    """
    The syntax of the arguments of a program that starts others.

    Attributes:
        flags: Options without a value.
        values: Options with a value, in the same word or the next.
        lines: Options whose value is a line of a shell, or a command in one word.
        operands: The least and the greatest number of words between the options and the command.
        rest: The meaning of the words after that. ``"command"``: an argument list. ``"open"``: an argument list to which the
            program adds words from its input. ``"line"``: a line of a shell, joined by blanks. ``"shell"``: with ``-c``
            lines, else a file and its arguments. ``"anywhere"``: a command that starts at any of them. ``"elsewhere"``: the
            same, but in a container. ``"none"``: no command.
        sets_variables: Words such as ``NAME=value`` may precede the command.
    """

    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    lines: frozenset[str] = frozenset()
    operands: tuple[int, int] = (0, 0)
    rest: Rest = "command"
    sets_variables: bool = False

    def list_option_word_counts(self, word: str) -> tuple[int, ...]:
        """Return the possible numbers of words of an option and its value: 1, 2 or both."""
        valued = self.values | self.lines
        if word in self.flags or word[1:].isdecimal() or (word.startswith("--") and "=" in word):
            return (1,)
        if word in valued:
            return (2,)
        if word.startswith("--"):  # abbreviated or unknown
            meant = {name in valued for name in self.flags | valued if name.startswith(word)}
            return tuple([1 + takes for takes in meant or (False, True)])
        for at, letter in enumerate(word[1:], start=2):
            if f"-{letter}" in valued:
                return (1,) if at < len(word) else (2,)
            if f"-{letter}" not in self.flags:
                return (1, 2) if letter.isalpha() else (1,)
        return (1,)


def _make_wrapper(
    options: str = "",
    *,
    operands: tuple[int, int] = (0, 0),
    rest: Rest = "command",
    lines: str = "",
    sets_variables: bool = False,
) -> Wrapper:
    """Return a wrapper; *options* is a text with all options, those with a value written ``-x=``."""
    words = options.split()
    flags = frozenset([word for word in words if not word.endswith("=")])
    values = frozenset([word[:-1] for word in words if word.endswith("=")])
    return Wrapper(flags, values, frozenset(lines.split()), operands, rest, sets_variables)


def _map_names_to_wrapper(names: str, wrapper: Wrapper) -> dict[str, Wrapper]:
    """Return a dict with *wrapper* for each of the blank-separated *names*."""
    return dict.fromkeys(names.split(), wrapper)


_SHELL = _make_wrapper("-o= -O= +o= +O= --rcfile= --init-file=", rest="shell")
_ANYWHERE = _make_wrapper(rest="anywhere")
_ELSEWHERE = _make_wrapper(rest="elsewhere")
_ONE = _make_wrapper(operands=(1, 1))
_PERSONALITY_FLAGS = (
    "-B -F -I -L -R -S -T -X -Z -v -3 --32bit --fdpic-funcptrs --short-inode --addr-compat-layout --addr-no-randomize "
    "--whole-seconds --sticky-timeouts --read-implies-exec --mmap-page-zero --3gb --4gb --uname-2.6 --verbose"
)
_RUN = "-q -v -n --quiet --verbose -p= --python= --package= --project= --directory="
_SSH = (
    "-4 -6 -A -a -C -f -G -g -K -k -M -N -n -q -s -T -t -V -v -X -x -Y -y "
    "-B= -b= -c= -D= -E= -e= -F= -I= -i= -J= -L= -l= -m= -O= -P= -p= -Q= -R= -S= -W= -w="
)

_LINE_OPTIONS = {
    "rg": "--pre --hostname-bin",
    "sort": "--compress-program",
    "tar, bsdtar": "-I --use-compress-program --to-command --checkpoint-action -F --info-script --new-volume-script --rsh-command --rmt-command",
    "rsync": "-e --rsh --rsync-path",
    "scp, sftp": "-o -S -D",
    "zip": "-TT --unzip-command",
    "man": "-P -H --pager --html --browser",
    "ex, gvim, nvim, vi, view, vim, vimdiff": "-c --cmd -S +",
    "split": "--filter",
    "ack, ag, bat, delta": "--pager",
    "install": "--strip-program",
    "wget": "--use-askpass -e --execute",
    "diff, diff3, sdiff": "--diff-program",
    "mypy": "--python-executable",
    "pip, pip3": "--python --editor",
    "pylint": "--init-hook",
    "rustc": "-C --codegen",
    "cargo": "--config",
    "npm, yarn": "--script-shell --shell --git --editor --viewer --node-options",
    "less, more, most": "+",
    "apt, apt-cache, apt-get, aptitude": "-o --option",
    "tox": "-x --override",
    "dotnet, msbuild": "--property -p: /p: -property: /property: --property:",
    "dnf, yum": "--setopt",
    "mapfile, readarray, complete, compgen": "-C -W",
    "hash": "-p",
    "tcpdump": "-z",
    "brew ruby": "-e",
    "git rebase": "-x --exec",
    "git difftool": "-x --extcmd",
    "git grep": "-O --open-files-in-pager",
    "git clone": "-u --upload-pack -c --config",
    "git archive, git fetch, git fetch-pack, git ls-remote, git pull, git push, git send-pack": "--upload-pack --receive-pack --exec",
    "gh repo clone, gh repo fork": "-u --upload-pack -c --config",
    "git send-email": "--sendmail-cmd --to-cmd --cc-cmd --header-cmd --smtp-server",
    "git filter-branch": "--setup --env-filter --tree-filter --index-filter --parent-filter --msg-filter --commit-filter --tag-name-filter",
    "meson test": "--wrap --wrapper --gdb-path",
    "go build, go clean, go fix, go generate, go get, go install, go list, go run, go test, go vet": "-exec -toolexec -vettool",
}  # fmt: skip
"""Options whose value is a program or a line of a shell, by the names of programs and subcommands whose other words are no command."""

WRAPPERS: Mapping[str, Wrapper] = {
    # shells, and programs that parse a line like a shell
    **_map_names_to_wrapper("ash bash csh dash elvish fish ksh mksh nu oksh pdksh posh rbash rksh rzsh sh tcsh xonsh yash zsh", _SHELL),
    **_map_names_to_wrapper("eval trap watchexec", _make_wrapper(rest="line")),
    "watch": _make_wrapper("-b -c -d -e -g -p -t -w -x -C -n= -q= --interval= --equexit= --exec", rest="line"),
    "entr": _make_wrapper("-a -c -d -n -p -r -s -x -z", rest="line"),
    **_map_names_to_wrapper("ssh autossh", _make_wrapper(_SSH, operands=(1, 1), rest="line", lines="-o")),
    # one command behind options
    "env": _make_wrapper("-i - -0 -v --ignore-environment --null --debug -u= -C= -a= -P= --unset= --chdir= --argv0=", sets_variables=True),
    **_map_names_to_wrapper("builtin busybox toybox catchsegv chronic command coproc eatmydata fghack ifne nocache nohup pgrphack unbuffer", _make_wrapper("-p -v -V")),
    "exec": _make_wrapper("-c -l -a="),
    "time": _make_wrapper("-a -p -q -v --append --portability --quiet --verbose -f= -o= --format= --output="),
    "timeout": _make_wrapper("-f -p -v --foreground --preserve-status --verbose -k= -s= --kill-after= --signal=", operands=(1, 1)),
    "nice": _make_wrapper("-n= --adjustment="),
    "ionice": _make_wrapper("-t --ignore -c= -n= -p= -P= -u= --class= --classdata= --pid= --pgid= --uid="),
    "chrt": _make_wrapper("-a -b -d -e -f -G -i -m -o -r -R -v --all-tasks -T= -P= -D= -p=", operands=(0, 1)),
    "taskset": _make_wrapper("-a -c -p --all-tasks --cpu-list --pid", operands=(1, 1)),
    "prlimit": _make_wrapper("-c -C -d -e -f -i -l -m -n -q -r -s -t -u -v -x -y --noheadings --raw --verbose -o= -p= --output= --pid="),
    "choom": _make_wrapper("-n= -p= --adjust= --pid="),
    "uclampset": _make_wrapper("-a -s -R -v -m= -M= -p="),
    "logsave": _make_wrapper("-a -s -v", operands=(1, 1)),
    "stdbuf": _make_wrapper("-i= -o= -e= --input= --output= --error="),
    "setsid": _make_wrapper("-c -f -w --ctty --fork --wait"),
    "setarch": _make_wrapper(_PERSONALITY_FLAGS, operands=(0, 1)),
    **_map_names_to_wrapper("linux32 linux64 i386 i486 i586 i686 athlon x86_64 uname26 ppc ppc64 s390 s390x arm aarch64 mips sparc", _make_wrapper(_PERSONALITY_FLAGS)),
    "arch": _make_wrapper("-32 -64 -i386 -x86_64 -x86_64h -arm64 -arm64e -c -d= -e= -arch="),
    "caffeinate": _make_wrapper("-d -i -m -s -u -t= -w="),
    "flock": _make_wrapper("-e -F -n -o -s -u -x --close --exclusive --nonblock --nb --no-fork --shared --unlock --verbose -E= -w= --conflict-exit-code= --timeout= --wait=", operands=(1, 1), lines="-c --command"),
    "chroot": _make_wrapper("-n --skip-chdir -g= -G= -u= --groups= --userspec=", operands=(1, 1)),
    "unshare": _make_wrapper("-c -C -f -i -m -n -p -r -T -u -U --cgroup --fork --ipc --mount --net --pid --time --user --uts --map-root-user --map-current-user --map-auto --mount-proc --keep-caps --kill-child -G= -R= -S= -w= -l= --root= --setgid= --setgroups= --setuid= --wd= --propagation="),
    "nsenter": _make_wrapper("-a -C -c -e -F -i -m -n -p -r -T -U -u -w -Z --all --cgroup --env --follow-context --ipc --join-cgroup --keep-caps --mount --net --no-fork --pid --preserve-credentials --root --time --user --user-parent --uts --wd -G= -N= -S= -t= -W= --net-socket= --setgid= --setuid= --target= --wdns="),
    "sudo": _make_wrapper("-A -B -b -E -e -H -i -K -k -l -N -n -P -S -s -V -v --askpass --background --login --non-interactive --preserve-env --set-home --shell --stdin -C= -D= -g= -h= -p= -R= -r= -T= -t= -U= -u= --chdir= --close-from= --group= --host= --prompt= --user=", sets_variables=True),
    "doas": _make_wrapper("-L -n -s -C= -u="),
    "pkexec": _make_wrapper("--disable-internal-agent --keep-cwd --user="),
    "runcon": _make_wrapper("-c --compute -l= -r= -t= -u=", operands=(0, 1)),
    "ssh-agent": _make_wrapper("-c -D -d -k -s -a= -E= -O= -P= -t="),
    "strace": _make_wrapper("-A -C -c -D -d -F -f -h -i -k -n -q -r -T -t -v -V -w -x -y -z -Z -a= -b= -E= -e= -I= -o= -O= -P= -p= -S= -s= -u= -U= -X="),
    "xvfb-run": _make_wrapper("-a -l --auto-servernum --listen-tcp -e= -f= -n= -p= -s= -w="),
    "ld.so": _make_wrapper("--list --verify --inhibit-cache --list-diagnostics --list-tunables --library-path= --preload= --argv0= --audit= --inhibit-rpath= --glibc-hwcaps-prepend= --glibc-hwcaps-mask="),
    **_map_names_to_wrapper("dbus-launch dbus-run-session doppler dumb-init fakeroot  heaptrack ltrace memusage multitime numactl pipesz proxychains proxychains4 qemu-user rlwrap setpriv softlimit systemd-inhibit tini torify torsocks trickle tsocks valgrind wine wine64 box64 fex", _make_wrapper()),
    **_map_names_to_wrapper("chpst cpulimit", _make_wrapper("-l= -p= -e= -u= -U= -n= -m= -d= -o= -b= -/= -v -P -0 -1 -2 -i -z")),
    **_map_names_to_wrapper("envdir envuidgid faketime gosu lckdo s6-envdir s6-envuidgid s6-setlock s6-setuidgid setlock setuidgid su-exec", _ONE),
    "xargs": _make_wrapper("-0 -o -p -r -t -x -e -i -l --null --interactive --no-run-if-empty --verbose --exit --eof --replace --max-lines --open-tty -a= -d= -E= -I= -J= -L= -n= -P= -R= -S= -s= --arg-file= --delimiter= --max-args= --max-procs= --max-chars=", rest="open"),
    **_map_names_to_wrapper("parallel sem", _make_wrapper(rest="open")),
    **_map_names_to_wrapper("npx pnpx bunx", _make_wrapper("-y -q --yes --no --no-install --quiet -p= --package= -w= --workspace=", lines="-c --call")),
    "uvx": _make_wrapper(f"{_RUN} --isolated --offline --with= --from="),
    # a command at any place, or several
    **_map_names_to_wrapper(". source", _ANYWHERE),
    **_map_names_to_wrapper("bwrap capsh cmake cmd coresched daemon distrobox firejail flatpak-spawn gdb hyperfine lldb mispipe mpiexec mpirun newgrp nix-shell orterun pee perf powershell pwsh rr runuser screen script scriptlive sg socat srun start-stop-daemon su systemd-run systemd-nspawn tmux toolbox zellij", _ANYWHERE),
    # options that name a program, among words that mean something else
    **{name: _make_wrapper(rest="none", lines=lines) for names, lines in _LINE_OPTIONS.items() for name in names.split(", ")},
    "make": _make_wrapper(rest="none", lines="-E --eval", sets_variables=True),
    "pnpm": _make_wrapper("-r -s -w --recursive --silent -C= -F= --dir= --filter= --script-shell= --shell= --git= --node-options=", lines="--script-shell --shell --git --editor --viewer --node-options"),
    "dotenv": _make_wrapper("-c -q --quote= -e= -f= -o= -v= -p= --file= --export="),
    # subcommands
    **dict.fromkeys(("brew sh", "brew bundle", "brew exec", "yarn workspace", "yarn workspaces", "pnpm recursive", "stepengine cassette record"), _ANYWHERE),
    **dict.fromkeys(("docker-compose exec", "docker-compose run", "kubectl debug", "kubectl exec", "kubectl run"), _ELSEWHERE),
    **{f"{program} {name}": _ELSEWHERE for program in ("docker", "podman") for name in ("run", "exec", "create", "container run", "container exec", "container create", "compose run", "compose exec")},
    "git config": _ANYWHERE,
    "git merge-index": _make_wrapper("-o -q"),
    "git bisect run": _make_wrapper(),
    "git remote-ext": _make_wrapper(operands=(1, 1), rest="line"),
    "git submodule foreach": _make_wrapper("-q --quiet --recursive", rest="line"),
    "uv run": _make_wrapper(f"{_RUN} -U -m --module --active --all-extras --all-groups --all-packages --dev --exact --frozen --isolated --locked --no-cache --no-config --no-dev --no-env-file --no-project --no-sync --offline --script --env-file= --extra= --group= --index= --no-extra= --no-group= --only-group= --with= --with-editable= --with-requirements="),
    "uv tool run": _make_wrapper(f"{_RUN} --isolated --offline --with= --from="),
    **{f"{name} run": _make_wrapper("-q -v --quiet --verbose -C= -P= --directory= --project=") for name in ("hatch", "pdm", "pipenv", "pipx", "poetry", "rye")},
    "hatch env run": _make_wrapper("--force-continue --ignore-compat -e= -f= -i= -x= --env= --exclude= --filter= --include="),
    "coverage run": _make_wrapper("-a -L -m -p --append --branch --module --parallel-mode --pylib --timid --concurrency= --context= --data-file= --debug= --include= --omit= --rcfile= --save-signal= --source= --source-dirs="),
    "meson devenv": _make_wrapper("--dump -C= -w= --dump-format= --workdir="),
    "pipenv shell": _SHELL,
    **{f"{name} run": _make_wrapper("-v --live-stream --no-capture-output --no-banner -n= -p= --cwd= --name= --prefix=") for name in ("conda", "mamba", "micromamba")},
    **{f"{name} exec": _make_wrapper() for name in ("asdf", "bundle", "bundler", "pnpm", "pyenv", "rbenv", "tox", "yarn")},
    **{name: _make_wrapper("-y --yes -w= -p= --package= --workspace=", lines="-c --call") for name in ("npm exec", "npm x", "mise exec", "mise x")},
    **{name: _make_wrapper() for name in ("pnpm dlx", "yarn dlx", "bun x", "asdf env", "tox e", "dotenv run", "op run", "op plugin run", "podman unshare", "cmake -E")},
    **dict.fromkeys(("direnv exec", "npm explore", "rustup run", "aws-vault exec"), _ONE),
    **dict.fromkeys(("nix develop", "nix env shell", "nix run", "nix shell", "cargo watch", "cargo flamegraph"), _ANYWHERE),
}  # fmt: skip
"""The wrappers by the name of the program, or its name and those of its subcommands."""

MODULES = {
    "perl": ("-M", "-m"),
    **dict.fromkeys(
        ("node", "nodejs", "ts-node", "tsx"), ("--import", "--loader", "--experimental-loader", "-r", "--require")
    ),
}
"""Options of interpreters whose value names a module, and may hold code."""
SEARCHES = {
    "ctest": ("--build-makeprogram", "--test-command"),
    "find": ("-exec", "-execdir", "-ok", "-okdir"),
    "fd": ("-x", "-X", "--exec", "--exec-batch"),
    "fdfind": ("-x", "-X", "--exec", "--exec-batch"),
}
"""Programs that run the command between one of these options and ``;`` or ``+``."""
CODE = {
    "bpython": "-c",
    "bun": "-e --eval -p --print",
    "clojure": "-e --eval",
    "deno": "eval --eval",
    "elixir": "-e --eval",
    "emacs": "--eval -eval --execute",
    "erl": "-eval",
    "expect": "-c",
    "ghc": "-e",
    "groovy": "-e",
    "guile": "-c",
    "ipython": "-c",
    "julia": "-e -E --eval --print",
    "lua": "-e",
    "luajit": "-e",
    "node": "-e -p --eval --print",
    "nodejs": "-e -p --eval --print",
    "osascript": "-e",
    "perl": "-e -E",
    "php": "-r -B -R -E --run --process-begin --process-code --process-end",
    "pypy": "-c",
    "python": "-c",
    "r": "-e",
    "racket": "-e --eval",
    "raku": "-e",
    "rscript": "-e",
    "ruby": "-e",
    "sbcl": "--eval",
    "scala": "-e",
    "swift": "-e",
    "tclsh": "",
    "ts-node": "-e -p --eval --print",
    "tsx": "-e -p --eval --print",
}
"""Interpreters, with their options for code. Without such an option, the first operand is a file and the others its arguments."""
STARTING_CODE = re.compile(
    r"`|%x|\bqx\b|\bsystem2?\b(?!\(\))|popen|spawn|\bexec(?:[lv]p?e?|File|Sync|FileSync)?\b|_exec\b|\bos\.execute\b|\bfork(?:pty)?\b|subprocess|child_process|"
    r"\bProcess\b|process\.(?:binding|mainModule)|\bpty\b|ctypes|shell|(?<!literal)(?:\b|_)eval\b|(?<!re\.)\bcompile\b|callCommand|"
    r"import_module|importlib\b(?!\.(?:metadata|resources)\b)|\bimport\s*\(|__import__|__dict__|__builtins__|getattr|globals|\bvars\b|"
    r"\brequire\b(?!\(\s*(['\"])[\w./@-]+\1\s*\))|proc_open|passthru|b64decode|doShellScript|do shell script|"
    # Perl and Ruby open programs like files, by a pipe in the name.
    r"\bopen\b[^|\n]{0,200}(?<!\|)\|(?!\|)|\bOpen3\b|\bDeno\.(?:Command|run)\b|(?:\bSystem\.|\bos[:.])cmd\b|\bCmd\(|sys\.process|"
    r"\.execute\(\s*\)|\brun[ \t]*[\"'<]|(?:call|make|start)-process|run-program|process-lines|(?<!\.)\bpipe\("
)
"""Code of common languages that starts programs, openly or hidden."""
STORING_CODE = re.compile(r"writ|put_contents|>|\bwb?\b|['\"][ax]b?['\"]")
"""Code that may write a file, such as ``open("x", "w")``, and ``w`` of sed."""
STARTING_AWK = re.compile(r"system[\s\\]*\(|@[A-Za-z_]\w*[\s\\]*\(|(?<!\|)\|(?!\|)")
"""Code that starts programs in awk: ``system``, a function call by a computed name, or a pipe."""
AWK_TOKEN = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*")|(?P<note>#[^\n]*)|(?P<name>[$\w]+)|(?P<blank>(?:[^\S\n]|\\\n)+)|.', re.DOTALL
)
AWK_PATTERN = re.compile(r"/(?:\\.|\[\^?\]?[^\]/\n\\]*\]|[^/\n\\\[])*/")
"""Excludes patterns with a slash in brackets, which ends the pattern for some programs."""
AWK_WORDS = frozenset(("case", "delete", "do", "else", "exit", "getline", "in", "print", "printf", "return"))
"""Words before a slash that starts a pattern; after other names the slash divides."""
SED_ADDRESS = r"(?:[0-9$]+(?:~[0-9]+)?|/(?:\\.|[^/\n\\]){0,200}/[IM]*|\\([^\n])(?:(?!\%d).){0,200}\%d[IM]*)"
SED_CHARACTER = r"(?:\\.|(?!\%d)[^\\])"
STARTING_SED = re.compile(
    r"(?:^|[;{}]|(?<!\\)\n)[ \t\v\f\r]*+(?:(?:"
    + SED_ADDRESS % (1, 1)
    + r"[ \t\v\f\r]*+,[ \t\v\f\r]*+)?(?:/(?:\\.|[^/\n\\]){200}|\\([^\n])(?:(?!\2).){200})|(?:"
    + SED_ADDRESS % (3, 3)
    + r"[ \t\v\f\r]*+(?:,[ \t\v\f\r]*+(?:[+~][0-9]+|"
    + SED_ADDRESS % (4, 4)
    + r"))?)?[ \t\v\f\r!]*+(?:e|s([^\n])"
    + rf"{SED_CHARACTER % 5}{{0,500}}\5{SED_CHARACTER % 5}{{0,500}}\5[gpiImM0-9]*e|s([^\n])"
    + rf"(?:{SED_CHARACTER % 6}{{500}}|{SED_CHARACTER % 6}{{0,499}}\6{SED_CHARACTER % 6}{{500}})))"
)
"""The command ``e``, or ``s`` with the flag ``e``, at the start of a sed command; also commands too long to be read."""
SED_BRACKETS = re.compile(r"\[\^?\]?[^\]\n]{0,200}\]")
"""Brackets in a pattern; for some programs, a delimiter in them ends the pattern."""
SAYS_VERSION = frozenset(("--help", "--version", "-V", "-h", "-v", "-version"))
TEXT_PROGRAMS = {
    "awk": _make_wrapper("-b -c -C -g -h -I -M -n -N -O -P -r -s -S -t -V --posix --sandbox --csv -v= -F= -f= -e= -i= -l= -E= --assign= --field-separator= --file= --source= --include= --load= --exec="),
    "sed": _make_wrapper("-n -E -r -s -u -z -i -b --quiet --silent --regexp-extended --separate --unbuffered --null-data --in-place --posix --debug --sandbox --follow-symlinks -e= -f= -l= --expression= --file= --line-length="),
}  # fmt: skip
"""Programs whose first operand is a program, each with its options."""
QUIET = frozenset((
    # builtins of shells and the core utilities
    ".", ":", "[", "[[", "alias", "b2sum", "base32", "base64", "basename", "bg", "break", "cat", "cd", "chgrp", "chmod", "chown", "cksum",
    "clear", "cmp", "comm", "continue", "cp", "csplit", "cut", "date", "dd", "declare", "df", "diff", "diff3", "dir", "dirname", "du",
    "echo", "exit", "expand", "export", "expr", "factor", "false", "fg", "file", "fmt", "fold", "free", "getopts", "groups", "hash", "head",
    "hostname", "iconv", "id", "jobs", "join", "kill", "link", "ln", "local", "locale", "logname", "ls", "lsof", "md5sum", "mkdir",
    "mkfifo", "mktemp", "mv", "nl", "nproc", "numfmt", "od", "paste", "patch", "pathchk", "pgrep", "pidof", "pinky", "pkill", "popd", "pr",
    "printenv", "printf", "ps", "pushd", "pwd", "read", "readlink", "readonly", "realpath", "return", "rm", "rmdir", "seq", "set", "sha1sum",
    "sha224sum", "sha256sum", "sha384sum", "sha512sum", "shasum", "shift", "shopt", "shred", "shuf", "sleep", "source", "ss", "stat", "strings",
    "stty", "sum", "sync", "tac", "tail", "tee", "test", "touch", "tr", "tree", "true", "truncate", "tsort", "tty", "type", "ulimit", "umask",
    "uname", "unalias", "unexpand", "uniq", "unlink", "unset", "uptime", "users", "vdir", "wait", "wc", "where", "whereis", "which", "who",
    "whoami", "yes",
    # searches, texts and archives
    "agrep", "bunzip2", "bzcat", "bzip2", "cloc", "colordiff", "column", "egrep", "exa", "eza", "fgrep", "grep", "gunzip",
    "gzip", "hexdump", "jq", "locate", "look", "lsd", "pcregrep", "rev", "rgrep", "scc", "sponge", "tokei", "ts", "ugrep", "unxz", "unzip", "unzstd",
    "xmllint", "xxd", "xz", "xzcat", "xzgrep", "yq", "zcat", "zgrep", "zstd", "zstdcat",
    # programs that run or check the files of a project
    "alembic", "ansible-lint", "autopep8", "bandit", "black", "clang-format", "clang-tidy", "codespell", "djlint", "eslint",
    "flake8", "flit", "gofmt", "goimports", "golangci-lint", "isort", "jest", "lint-imports", "markdownlint", "mkdocs", "mocha",
    "mypy", "ninja", "nose2", "pip", "pip-compile", "pip3", "playwright", "prettier", "py.test", "pycodestyle", "pydocstyle", "pyflakes", "pylint",
    "pyright", "pytest", "pyupgrade", "rspec", "rubocop", "ruff", "rustc", "rustfmt", "shellcheck", "shfmt", "sphinx-build",
    "stylelint", "taplo", "tsc", "twine", "unittest", "venv", "vitest", "vulture", "webpack", "yamllint",
    # networks and packages
    "apk", "aws", "curl", "dig", "dpkg-query", "gh", "host", "http", "nslookup", "pacman", "ping", "port", "zypper",
))  # fmt: skip
"""
Programs that start no program named in their arguments: they show, search or change files, or run the content of files.

A program in none of these tables may be an unlisted wrapper.
"""
PROGRAMS = (
    frozenset([key.partition(" ")[0] for key in WRAPPERS]) | QUIET | frozenset(("cargo", "ctest", "gem", "go", "npm"))
)
"""All programs in the tables."""
GIT_COMMANDS = frozenset((
    "add", "am", "annotate", "apply", "archimport", "archive", "bisect", "blame", "branch", "bugreport", "bundle",
    "cat-file", "check-attr", "check-ignore", "check-mailmap", "check-ref-format", "checkout", "checkout-index", "cherry",
    "cherry-pick", "citool", "clean", "clone", "column", "commit", "commit-graph", "commit-tree", "config", "count-objects",
    "credential", "credential-cache", "credential-store", "cvsexportcommit", "cvsimport", "daemon", "describe",
    "diagnose", "diff", "diff-files", "diff-index", "diff-tree", "difftool", "fast-export", "fast-import", "fetch",
    "fetch-pack", "filter-branch", "fmt-merge-msg", "for-each-ref", "for-each-repo", "format-patch", "fsck",
    "fsmonitor--daemon", "gc", "get-tar-commit-id", "gitk", "grep", "gui", "hash-object", "help", "hook", "http-backend",
    "imap-send", "index-pack", "init", "init-db", "interpret-trailers", "lfs", "log", "ls-files", "ls-remote",
    "ls-tree", "mailinfo", "mailsplit", "maintenance", "merge", "merge-base", "merge-file", "merge-index", "merge-one-file",
    "merge-tree", "mergetool", "mktag", "mktree", "multi-pack-index", "mv", "name-rev", "notes", "p4", "pack-objects",
    "pack-redundant", "pack-refs", "patch-id", "prune", "prune-packed", "pull", "push", "quiltimport", "range-diff",
    "read-tree", "rebase", "receive-pack", "reflog", "remote", "remote-ext", "remote-fd", "repack", "replace", "replay",
    "request-pull", "rerere", "reset", "restore", "rev-list", "rev-parse", "revert", "rm", "send-pack",
    "shell", "shortlog", "show", "show-branch", "show-index", "show-ref", "sparse-checkout", "stage", "stash", "status",
    "stripspace", "submodule", "subtree", "switch", "symbolic-ref", "tag", "unpack-file", "unpack-objects",
    "update-index", "update-ref", "update-server-info", "upload-archive", "upload-pack", "var", "verify-commit",
    "verify-pack", "verify-tag", "version", "whatchanged", "worktree", "write-tree",
))  # fmt: skip
"""Subcommands of git itself. Another word may be an alias of the repository, or take a program to start, as ``svn`` does."""
GIT_VALUES = frozenset(
    ("-C", "-c", "--attr-source", "--config-env", "--git-dir", "--namespace", "--super-prefix", "--work-tree")
)
LOADER = re.compile(r"ld(?:64)?(?:[-.][a-z0-9_.-]*)?\.so(?:\.[0-9]+)*")
LETTERS_OF_TAR = frozenset("bCFfgHIKLNTVX")
"""The letters that take a value."""
ALIAS = re.compile(r"alias\.([^=]+)=(.*)", re.DOTALL | re.IGNORECASE)
SETTING = re.compile(r"[ \t]*[A-Za-z_][A-Za-z0-9_.:-]*[ \t]*=")
ESCAPES_OF_ENV = re.compile(r"\\[_fnrtv]")
LETTERS = re.compile(r"-[A-Za-z0-9]*?([xX])(.*)", re.DOTALL)
ASKS_FOR_SHELL = re.compile(r"-[A-Za-z]*[isS]|--shell|--login")
STARTING_SHELLS: Mapping[str, int] = {
    **dict.fromkeys(("chroot", "doas", "fakeroot", "nsenter", "setarch", "sudo", "unshare"), 1),
    **dict.fromkeys([name for name in WRAPPERS if WRAPPERS[name] == WRAPPERS["linux64"]], 1),
    **dict.fromkeys(("cmd", "firejail", "nix-shell", "powershell", "pwsh", "systemd-run"), 1),
    **dict.fromkeys(("newgrp", "script", "sg"), 2),
    **dict.fromkeys(("runuser", "su"), 3),
}
"""Wrappers that start a shell if they have fewer operands than this."""
DEBUGGERS = frozenset(("gdb", "lldb"))
COPYING = frozenset(("cp", "install", "ln", "mv"))
EDITORS = ("ex", "gvim", "nvim", "vi", "view", "vim", "vimdiff")
"""Programs whose commands run the line after a ``!`` in a shell, as in ``:r !date``."""
COMMAND_FILES: Mapping[str, tuple[str, ...]] = {
    "gdb": ("-x", "--command", "-command"),
    "lldb": ("-s", "--source"),
    "make": ("-f", "--file", "--makefile"),
    "ninja": ("-f",),
    **dict.fromkeys(EDITORS, ("-S", "-s", "-u")),
}
"""Options whose value is a file with commands."""
FILE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    **COMMAND_FILES,
    "awk": ("-f", "--file", "-E", "--exec"),
    "sed": ("-f", "--file"),
    **dict.fromkeys(("autossh", "scp", "sftp", "ssh"), ("-F",)),
}
"""``COMMAND_FILES``, and options for program files of text tools and for settings that name commands."""
SETTING_WORDS = frozenset(("alias", "declare", "export", "readonly", "typeset"))
"""Shell commands whose values a later command may run."""
INDEXING = frozenset(
    ("[", "declare", "export", "let", "mapfile", "printf", "read", "readarray", "test", "typeset", "unset", "wait")
)
"""Shell commands that evaluate the names of variables."""
GITS = frozenset(("git", "hub", "yadm"))
INPUTS = ("<", "/dev/fd/", "/dev/stdin", "/proc/self/fd/")
PLACEHOLDER = "{}"
"""Placeholder for the name of a file that ``find`` found."""
ADDED_WORDS = "\ufdd1"
"""Placeholder for words from the input of ``xargs``: a character that Unicode does not assign."""
MARK_OPTIONS = ("-I", "-J", "-i", "--replace")
"""Options of ``xargs`` and ``parallel`` whose value is the text that they replace with input words."""
MARK_OF_PARALLEL = re.compile(r"\{[^{}\s]*\}")
FOUND_FILE = re.compile(r"\{(?://?|/?\.)?\}")
"""The text that ``find`` and ``fd`` replace with the name of a file, or a part of it."""
UNREADABLE = "it has more words or wrappers than are read"


def normalize_program_name(word: str) -> str:
    """Return the name of a program in lower case, without its folder."""
    return word.rpartition("/")[2].casefold().removesuffix(".exe")


def _get_program_table_key(word: str) -> str:
    """Return the name of a program in the tables: without a version and the ``g`` of GNU tools, with one name for all loaders."""
    name = normalize_program_name(word)
    if LOADER.fullmatch(name):
        return "ld.so"
    if name.startswith("qemu-"):
        return "qemu-user"
    stem = name.rstrip("0123456789.-")
    for known in (name, stem, name[1:] if name.startswith("g") else ""):
        if known in PROGRAMS or known in SEARCHES or known in CODE or known in TEXT_PROGRAMS or known in GITS:
            return known
    return {"mawk": "awk", "nawk": "awk"}.get(name, name)


class _Derived(NamedTuple):
    """A command that another one starts: *is_possible* if that is not certain, *is_guess* if its first word may be no program."""

    command: Argv | Script
    is_possible: bool = False
    is_guess: bool = False


@lru_cache(CACHED)
def find_started_commands(command: Argv | Script) -> StartedCommands:
    """Return the commands that a command starts, itself first."""
    return _CommandSearch(command).collect_started_commands()


class _CommandSearch:
    """Collects the commands that one command starts, up to a limit of characters."""

    def __init__(self, command: Argv | Script) -> None:
        self._command = command
        self._left = max(MAX_COPIES * _count_chars(command), MIN_DERIVED_CHARS)
        self._unclear = ""
        self._understood = set[_Derived]()
        self._is_script = isinstance(command, Script)

    def collect_started_commands(self) -> StartedCommands:
        """Derive commands from the command and from each derived command, and return all of them."""
        first = _Derived(self._command)
        pending, seen = [first], {first: None}
        while pending and self._left > 0:
            derived = pending.pop()
            for item in self._derive_from_command(derived):
                found = item._replace(is_possible=item.is_possible or derived.is_possible)
                self._left -= _count_chars(found.command) + MIN_CHARS
                if self._left <= 0:
                    break
                if found not in seen:
                    seen[found] = None
                    pending.append(found)
        if self._left <= 0:
            self._set_unclear(UNREADABLE)
            text = self._command.text if isinstance(self._command, Script) else shlex.join(self._command)
            seen[_Derived(Script(text, UNREADABLE))] = None
        # All words of a script count if some of its commands are unknown.
        seen = {one: None for one in seen if self._unclear or one not in self._understood}
        commands = dict.fromkeys([one.command for one in seen if not one.is_possible])
        possible = dict.fromkeys([one.command for one in seen if one.is_possible])
        return StartedCommands(tuple(commands), tuple(possible), self._unclear)

    def _derive_from_command(self, derived: _Derived) -> Iterator[_Derived]:
        """Yield the commands that a command or script starts directly."""
        if isinstance(derived.command, Script):
            yield from self._derive_from_script(derived)
        else:
            program = derived.command[0]
            if program.endswith(EXPANSION) and not derived.is_guess:
                self._set_unclear(f"only the shell knows which program {program.replace(EXPANSION, '')!r} is")
            yield from self._derive_from_argv(derived.command, is_guess=derived.is_guess)

    def _set_unclear(self, reason: str) -> None:
        """Mark the result as unclear for a *reason*; the first reason stays."""
        self._unclear = self._unclear or reason

    def _derive_from_script(self, derived: _Derived) -> Iterator[_Derived]:
        """Yield the commands of a script and those in its variables and piped texts; unclear syntax marks the result unclear."""
        is_guess = derived.is_guess
        text = derived.command.text if isinstance(derived.command, Script) else ""
        parsed = split_script(text)
        if parsed.is_understood and not is_guess:
            self._understood.add(derived)
        if parsed.is_unclear and not is_guess:
            self._set_unclear("shells parse it in different ways")
        paths = () if is_guess else (*parsed.written, *_find_files_written_by_programs(parsed))
        written = {name for name in map(_get_file_name, paths) if name and not name.isdecimal()}
        printed = [word for one in parsed.commands if one.words[0] in {"echo", "printf"} for word in one.words]
        exports = any(_exports_variables(simple.words) for simple in parsed.commands)
        for simple in parsed.commands:
            yield _Derived(simple.words, is_guess=is_guess)
            exported = simple.words[1:] if simple.words[0] in SETTING_WORDS else ()
            # An assigned variable that is not exported is no setting of a program.
            settings = simple.settings if exports or simple.words != (":",) else ()
            yield from _derive_from_variable_values([*settings, *[word for word in exported if "=" in word]])
            if not is_guess:
                yield from self._derive_from_piped_text(simple, text, printed)
                yield from self._derive_from_interpreters(simple, text, written)

    def _derive_from_piped_text(self, simple: SimpleCommand, text: str, printed: Sequence[str]) -> Iterator[_Derived]:
        """Yield the texts that the script pipes to a program that is in no table, because it may run them."""
        if _is_known_program(_get_program_table_key(simple.words[0])):
            return
        if simple.has_heredoc:
            yield _Derived(Script(text, "code"), is_possible=True, is_guess=True)
        elif simple.is_piped:
            yield _Derived(_make_script_from_words(printed), is_possible=True, is_guess=True)

    def _derive_from_interpreters(
        self, simple: SimpleCommand, text: str, written: AbstractSet[str]
    ) -> Iterator[_Derived]:
        """Yield the script's text if *simple*, directly or behind wrappers, runs a file that the script writes, or its standard input."""
        inputs = [value for setting in simple.settings if (value := setting.partition("=")[2]).startswith(INPUTS)]
        readers = _unwrap_commands(simple.words)
        if len(readers) > MAX_WRAPPERS:
            self._set_unclear(UNREADABLE)
        for words in readers:
            name = _get_program_table_key(words[0])
            files = _find_files_to_run(name, words)
            if not written.isdisjoint(map(_get_file_name, files)):
                yield _Derived(Script(text, "a file that it writes"), is_guess=True)
                # Quotes in the output may hide a program from a search for its name.
                is_script = _get_file_name(words[0]) in written or (_runs_script_files(name) and name not in CODE)
                if is_script or (name in CODE and STARTING_CODE.search(text)):
                    self._set_unclear(f"{words[0]!r} runs what the script writes, which may start programs")
            has_commands = name in FILE_OPTIONS or _runs_script_files(name)
            if has_commands and any(word.startswith(INPUTS) for word in (*files, *inputs)):
                self._set_unclear(f"{words[0]!r} runs what it reads from another program")
            if not (simple.is_piped or simple.has_heredoc) or not _runs_standard_input(name, words):
                continue
            yield _Derived(Script(text, "code"), is_guess=True)
            # `uv run -` reads Python.
            if simple.is_piped or (name not in CODE and name != "-") or STARTING_CODE.search(text):
                self._set_unclear(f"{words[0]!r} runs what it reads, which may start programs")

    def _derive_from_argv(self, words: Argv, *, is_guess: bool) -> Iterator[_Derived]:
        """Yield the commands that an argument list starts, by the table that contains its program."""
        name = _get_program_table_key(words[0])
        if len(words) > COMMAND_WORDS:
            self._set_unclear(UNREADABLE)
            return
        if name in GITS or normalize_program_name(words[0]).startswith("git-"):
            yield from self._derive_from_git(words)
            return
        if name in SEARCHES:
            yield from _derive_from_exec_options(SEARCHES[name], words)
        elif name in TEXT_PROGRAMS or name in INDEXING:
            self._mark_unclear_if_code_in_argument(name, words)
        elif name in CODE:
            yield from self._derive_from_code_options(name, words)
        elif name not in PROGRAMS:
            yield from self._derive_from_unknown_program(words, is_guess=is_guess)
        for wrapper, start in _find_wrappers(name, words):
            yield from self._derive_from_wrapper(name, wrapper, words, start)

    def _derive_from_unknown_program(self, words: Argv, *, is_guess: bool) -> Iterator[_Derived]:
        """Yield the commands that the arguments of an unknown program may be, unless the command itself is a guess."""
        if FOUND_FILE.search(words[0]) or ADDED_WORDS in words[0]:
            self._set_unclear("it starts a program whose name comes from its input")
        elif not is_guess:
            yield from self._derive_from_arguments(words[1:])

    def _derive_from_arguments(self, words: Argv) -> Iterator[_Derived]:
        """Yield the commands that an unknown program or git subcommand may start: those that its arguments may be."""
        if words:
            yield _Derived(_make_script_from_words(words), is_possible=not self._is_script, is_guess=True)
            for found in _derive_from_each_word(words, _names_program_starter):
                yield found._replace(is_possible=True)

    def _derive_from_wrapper(self, name: str, wrapper: Wrapper, words: Argv, first: int) -> Iterator[_Derived]:
        """Yield the commands behind a wrapper such as ``env``, and those in its options."""
        for text in _find_option_values(wrapper.lines, _spell_out_tar_letters(name, words)[first:]):
            yield from self._derive_from_option_value(text)
            if name in EDITORS:
                yield from [
                    _Derived(line)
                    for found in re.finditer("!", text)
                    for line in _parse_shell_line(text[found.end() :])
                ]
        if wrapper.rest == "shell":
            yield from self._derive_from_shell(words)
        elif wrapper.rest == "anywhere":
            yield from _derive_from_each_word(words[first:])
        elif wrapper.rest == "elsewhere":
            yield from self._derive_from_unknown_program(words[first - 1 :], is_guess=False)
        else:
            starts = _find_command_starts(wrapper, words, first) if wrapper.rest != "none" else []
            before = words[first : min(starts, default=len(words))]
            yield from _derive_from_split_string(words, before) if name == "env" else ()
            yield from _derive_from_leading_variables(wrapper, before)
            for start in starts:
                if wrapper.rest == "open":
                    yield from self._derive_from_xargs(name, words[first:start], words[start:])
                else:
                    yield from self._derive_from_wrapped_words(name, wrapper, words[start:], is_guess=len(starts) > 1)

    def _derive_from_wrapped_words(
        self, name: str, wrapper: Wrapper, rest: Argv, *, is_guess: bool
    ) -> Iterator[_Derived]:
        """Yield the commands in *rest*, the words after the options of a wrapper."""
        if wrapper.rest == "line":
            yield from map(_Derived, _parse_shell_line(" ".join(rest)))
        elif any(char.isspace() for char in rest[0]):  # not a program name: some wrappers pass it to a shell
            yield from map(_Derived, _parse_shell_line(rest[0]))
        yield _Derived(rest, is_guess=is_guess)
        if name == "hatch" and ":" in rest[0]:  # the environment in front of the command
            yield _Derived((rest[0].partition(":")[2] or PLACEHOLDER, *rest[1:]), is_guess=is_guess)

    def _derive_from_xargs(self, name: str, options: Argv, rest: Argv) -> Iterator[_Derived]:
        """Yield the commands of ``xargs`` or ``parallel``, with placeholders for the words from their input."""
        marks = [mark for mark in _find_option_values(MARK_OPTIONS, options) if mark]
        if name != "xargs":
            rest = tuple(takewhile(lambda word: not word.startswith(":::"), rest))
        opened = list[str]()
        for word in (*rest, ADDED_WORDS):
            filled = MARK_OF_PARALLEL.sub(ADDED_WORDS, word) if name != "xargs" else word.replace("{}", ADDED_WORDS)
            for mark in marks:
                filled = filled.replace(mark, ADDED_WORDS)
            opened.append(filled)
        # The added words may be those of the rule.
        is_possible = not self._is_script
        if name == "xargs":
            yield _Derived(rest)
            yield _Derived(tuple(opened), is_possible=is_possible)
        else:
            yield from map(_Derived, _parse_shell_line(" ".join(rest)))
            yield from [_Derived(line, is_possible=is_possible) for line in _parse_shell_line(" ".join(opened))]

    def _derive_from_option_value(self, text: str) -> Iterator[_Derived]:
        """Yield the commands in the value of an option that names a program or contains code, which may mark the result unclear."""
        for line in _parse_shell_line(text):
            yield _Derived(line)
            if not isinstance(line, Script):
                yield _Derived(_make_script_from_words(line[:1]), is_possible=True, is_guess=True)
        if STARTING_CODE.search(text):
            self._set_unclear("an option has code that may start programs")

    def _derive_from_shell(self, words: Argv) -> Iterator[_Derived]:
        """Yield the code of ``sh -c`` as a script, and commands in other words of a shell's arguments."""
        operands = [word for word in words[1:] if _is_operand(word) and word != "-"]
        options = [word for word in words[1:] if not _is_operand(word)]
        lines = [word.partition("=")[2] for word in options if word.startswith("--") and "=" in word]
        if any("c" in word for word in options if not word.startswith("--")) or "--command" in options:
            lines += operands
        elif operands and not any("s" in word for word in options if not word.startswith("--")):
            yield from _derive_from_each_word(operands)
            yield _Derived(_make_script_from_words(operands), is_possible=True, is_guess=True)
        elif not lines and not {"--help", "--version"} & set(options):
            self._set_unclear(f"{words[0]!r} reads its commands from its input")
        yield from [_Derived(line) for text in lines for line in _parse_shell_line(text)]

    def _derive_from_code_options(self, name: str, words: Argv) -> Iterator[_Derived]:
        """Yield the code in options such as ``python -c``; code that may start programs marks the result unclear."""
        codes = list(_find_option_values(CODE[name].split(), words[1:]))
        for module in _find_option_values(MODULES.get(name, ()), words[1:]):
            if module.startswith("data:") or (name == "perl" and STARTING_CODE.search(module)):
                self._set_unclear(f"a module that {words[0]!r} loads may start programs")
        for code in codes:
            yield _Derived(Script(code, "code"), is_possible=True, is_guess=True)
            if STARTING_CODE.search(code) or _is_only_expansion(code):
                self._set_unclear(f"the code behind {words[0]!r} may start programs")
        yield from _derive_from_perl_pipes(words) if name == "perl" else ()
        module = next(iter(_find_option_values(["-m"], words[1:])), "") if name in {"python", "pypy"} else ""
        if module:
            yield from self._derive_from_python_module(module, words)
        elif not codes:
            operands = [at for at, word in enumerate(words) if at and _is_operand(word)]
            if operands and len(words) > operands[0] + 1:
                yield _Derived(_make_script_from_words(words[operands[0] + 1 :]), is_possible=True, is_guess=True)

    def _derive_from_python_module(self, module: str, words: Argv) -> Iterator[_Derived]:
        """Yield the commands that a Python module such as ``timeit`` starts, from the words after ``-m``."""
        # The option may stand alone, before its value, or behind others in one word, such as `-um` and `-umpytest`.
        joined = re.compile(rf"-\w*m{re.escape(module)}")
        at = next((at for at, word in enumerate(words) if word in {"-m", module} or joined.fullmatch(word)), None)
        if at is None:
            self._set_unclear(f"the arguments of the module {module!r} may start programs")
            return
        rest = words[at + 1 + (words[at] == "-m") :]
        yield _Derived((module.partition(".")[0], *rest), is_possible=True)
        if module == "timeit" and any(STARTING_CODE.search(word) for word in rest):
            self._set_unclear(f"the code behind {module!r} may start programs")

    def _mark_unclear_if_code_in_argument(self, name: str, words: Argv) -> None:
        """Mark the result unclear if an awk or sed script, or an array index in a shell builtin, may start programs."""
        if name in INDEXING:
            if any(INDEX.search(word) for word in words):
                self._set_unclear(f"the {words[0]!r} of a shell may start programs in an index")
            return
        wrapper = TEXT_PROGRAMS[name]
        options = ["-e", "-f", "--expression", "--file", "--source"]
        programs = list(_find_option_values(options, words[1:]))
        for start in _find_command_starts(wrapper, words, 1):
            # After an option with a program the first operand is a file; after `-i` of BSD it may be empty.
            if not any(True for _ in _find_option_values(options, words[1:start])):
                programs += words[start : start + 1 + (words[start] == "")]
        starts_programs = _awk_starts_programs if name == "awk" else _sed_starts_programs
        if any(_is_only_expansion(one) or starts_programs(one.removesuffix(EXPANSION)) for one in programs):
            self._set_unclear(f"the program for {words[0]!r} may start programs")

    def _derive_from_git(self, words: Argv) -> Iterator[_Derived]:
        """Yield the commands that git starts: by its subcommand, its options and ``-c`` settings."""
        name = normalize_program_name(words[0])
        if name != "git":
            front = ("git",) if name in GITS else ("git", name.removeprefix("git-"))
            yield _Derived((*front, *words[1:]))
            return
        rest, settings = self._read_git_options(words)
        found = [alias for setting in settings if (alias := ALIAS.match(setting))]
        for alias in found:
            line = alias[2][1:] if alias[2].startswith("!") else f"git {alias[2]}"
            yield from map(_Derived, _parse_shell_line(f"{line} {shlex.join(rest[1:])}"))
        for setting in settings:
            yield from [_Derived(line, is_possible=True) for line in _parse_shell_line(setting.partition("=")[2])]
        if rest and rest[0] not in GIT_COMMANDS and rest[0].casefold() not in {one[1].casefold() for one in found}:
            yield _Derived(Script("git", "an alias"), is_possible=True, is_guess=True)
            yield from self._derive_from_arguments(rest[1:])
        for wrapper, start in _find_wrappers("git", ("git", *rest)):
            yield from self._derive_from_wrapper("git", wrapper, ("git", *rest), start)
        if rest[:1] in {("for-each-repo",), ("subtree",)}:
            yield from [_Derived(("git", *rest[start:])) for start in _find_command_starts(Wrapper(), rest, 1)]
        for word in rest:
            _, is_helper, line = word.partition("ext::")
            yield from map(_Derived, _parse_shell_line(line) if is_helper else ())

    def _read_git_options(self, words: Argv) -> tuple[Argv, list[str]]:
        """Return (words from the subcommand on, ``-c`` settings) of a git command; ``--config-env`` marks the result unclear."""
        at, settings = 1, list[str]()
        while at < len(words) and not _is_operand(words[at]):
            option, equals, _ = words[at].partition("=")
            takes_next = option in GIT_VALUES and not equals
            if option == "-c":
                settings += words[at + 1 : at + 2]
            elif option == "--config-env":
                self._set_unclear("a setting of git has an unknown value")
            at += 1 + takes_next
        return words[at:], settings


def _count_chars(command: Argv | Script) -> int:
    """Return the number of characters of a command."""
    return len(command.text) if isinstance(command, Script) else sum([len(word) + 1 for word in command])


def _make_script_from_words(words: Sequence[str]) -> Script:
    """Return words joined as a shell script."""
    return Script(shlex.join(words), "words behind a program")


def _is_operand(word: str) -> bool:
    """Return whether a word does not start with ``-`` or ``+``, or is one of these alone."""
    return len(word) <= 1 or word[0] not in "-+"


def _parse_shell_line(text: str) -> list[Argv | Script]:
    """Return the commands in a line of a shell, as words or a script; for ``name=line`` also those after the ``=``."""
    found = list[Argv | Script]()
    setting = SETTING.match(text)
    for line in (text, text[setting.end() :]) if setting else (text,):
        try:
            words = split_argv(line)
        except ValueError as error:
            found.append(Script(line, str(error)))
        else:
            found += [words] if words and words[0] else []
    return found


def _find_wrappers(name: str, words: Argv) -> Iterator[tuple[Wrapper, int]]:
    """Yield (syntax, index of the first argument) of a program and of its subcommands that start others."""
    if name == "command" and words[1:2] in {("-v",), ("-V",)}:  # it only prints the path of the program
        return
    if found := WRAPPERS.get(name):
        yield found, 1
    if name not in WITH_SUBCOMMANDS:
        return
    places = {(name, 1)}
    for _ in range(2):
        places = {
            (f"{key} {words[at]}", at + 1)
            for key, start in places
            for at in find_option_ends(words, {start})
            if at < len(words)
        }
        yield from [(WRAPPERS[key], start) for key, start in sorted(places) if key in WRAPPERS]
        places = {(key, start) for key, start in places if key in WITH_SUBCOMMANDS}


def _unwrap_commands(words: Argv) -> list[Argv]:
    """Return a command and the commands behind its wrappers, which all read the same standard input."""
    found = {words: None}
    pending = [words] if len(words) <= COMMAND_WORDS else []
    while pending and len(found) <= MAX_WRAPPERS:
        one = pending.pop()
        for wrapper, first in _find_wrappers(_get_program_table_key(one[0]), one):
            for start in _find_command_starts(wrapper, one, first) if wrapper.rest == "command" else ():
                if one[start:] not in found:
                    found[one[start:]] = None
                    pending.append(one[start:])
    return list(found)


def find_option_ends(words: Sequence[str], option_starts: Iterable[int]) -> set[int]:
    """Return the indexes at which options from the indexes *option_starts* on may end; any option may have the next word as its value."""
    ends, reached = set[int](), set(option_starts)
    if reached:
        for at in range(min(reached), len(words)):
            if at in reached:
                ends.add(at)
                if words[at].startswith("-"):
                    reached.update((at + 1, at + 2))
                elif words[at].startswith("+"):  # the toolchain of `cargo +nightly`
                    reached.add(at + 1)
    return ends


def _find_command_starts(wrapper: Wrapper, words: Argv, first: int) -> list[int]:
    """Return the indexes at which the command behind a wrapper may start; *first* is the index of its first argument."""
    starts, seen = set[int](), set[tuple[int, int, bool]]()
    pending = [(first, 0, True)]
    while pending:
        state = at, operands, has_options = pending.pop()
        if state in seen or at >= len(words):
            continue
        seen.add(state)
        word = words[at]
        if has_options and word == "--":
            pending.append((at + 1, operands, False))
        elif has_options and (word in wrapper.flags or not _is_operand(word)):
            pending += [(at + length, operands, True) for length in wrapper.list_option_word_counts(word)]
        elif wrapper.sets_variables and ASSIGNMENT.match(word):
            pending.append((at + 1, operands, has_options))
        else:
            if operands >= wrapper.operands[0]:
                starts.add(at)
            if operands < wrapper.operands[1]:
                pending.append((at + 1, operands + 1, has_options))
    return sorted(starts)


def _find_option_values(options: Iterable[str], words: Argv) -> Iterator[str]:
    """Yield the values of options: attached, after ``=``, in the next word, or after combined single letters."""
    options = list(options)
    letters = {option[1] for option in options if len(option) == 2}  # noqa: PLR2004 - a dash and a letter
    for word, following in zip(words, (*words, "")[1:], strict=True):
        name, equals, value = word.partition("=")
        if word[:1] == "+" and "+" in options:
            yield word[1:]
        elif found := next((one for one in options if one[-1:] == ":" and word.casefold().startswith(one)), ""):
            yield word[len(found) :]
        elif equals and name in options and name[2:]:
            yield value
        elif word in options or (name[2:] and any(option.startswith(name) for option in options if name[:2] == "--")):
            yield value if equals and name[:2] == "--" else following
        elif word[:1] == "-" and word[:2] != "--":
            at = next((at for at, letter in enumerate(word[1:], start=1) if letter in letters), len(word))
            yield from [word[at + 1 :] or following] if at < len(word) else ()
            # In `node -pe CODE` the last letter has a value, too.
            yield from [following] if at < len(word) - 1 and word[-1] in letters else ()


def _spell_out_tar_letters(name: str, words: Argv) -> Argv:
    """Return the words of ``tar`` with an option for each letter of its first word, as in ``tar cIf PROGRAM FILE``."""
    if name not in {"tar", "bsdtar"} or not words[1:2] or not words[1].isalpha():
        return words
    spelled, values = list[str](), list(words[2:])
    for letter in words[1]:
        has_value = letter in LETTERS_OF_TAR and bool(values)
        spelled += [f"-{letter}", *([values.pop(0)] if has_value else [])]
    return (words[0], *spelled, *values)


def _derive_from_split_string(words: Argv, options: Argv) -> Iterator[_Derived]:
    """Yield the commands of ``env -S``: the words in its value and the words after it, which ``env`` parses again."""
    for value in _find_option_values(["-S", "--split-string"], (*options, *words[1 + len(options) : 2 + len(options)])):
        text = ESCAPES_OF_ENV.sub(" ", value)
        behind = words[words.index(value) + 1 :] if value in words else words[1 + len(options) :]
        for line in _parse_shell_line(text):
            yield _Derived(line if isinstance(line, Script) else ("env", *line, *behind))
        if SETTING.match(text):
            yield from map(_Derived, _parse_shell_line(f"env {text}"))


def _derive_from_leading_variables(wrapper: Wrapper, words: Argv) -> Iterator[_Derived]:
    """Yield the commands in variables before a command, such as ``CC=gcc``: ``make`` runs them, other programs may."""
    settings = [word for word in words if ASSIGNMENT.match(word)] if wrapper.sets_variables else []
    yield from _derive_from_variable_values(settings)
    for word in settings if wrapper.rest == "none" else ():
        yield from map(_Derived, _parse_shell_line(word.partition("=")[2]))


def _derive_from_variable_values(settings: Iterable[str]) -> Iterator[_Derived]:
    """Yield the commands in the values of variables, and the values as texts in which any word may be a program."""
    for setting in settings:
        value = setting.partition("=")[2]
        # A value that the shell expands, as in `FOO=$BAR`, is rarely a command.
        is_guess = value.endswith(EXPANSION)
        yield from [_Derived(line, is_possible=True, is_guess=is_guess) for line in _parse_shell_line(value)]
        yield _Derived(Script(value, "a variable"), is_possible=True, is_guess=True)


def _awk_starts_programs(program: str) -> bool:
    """Return whether an awk program runs commands; texts and patterns in it are ignored, except in unreadable parts."""
    code, at, previous = list[str](), 0, ""
    while found := AWK_TOKEN.match(program, at):
        piece = found[0]
        if piece == '"' or (piece == "/" and previous in {")", "+", "-"}):
            break
        is_operand = previous not in AWK_WORDS and (previous[-1:] in {'"', "]", "$", "_"} or previous[-1:].isalnum())
        if piece == "/" and not is_operand:
            pattern = AWK_PATTERN.match(program, at)
            if pattern is None:
                break
            found, piece = pattern, '""'
        at = found.end()
        code.append('""' if found.lastgroup == "text" else "" if found.lastgroup == "note" else piece)
        previous = previous if found.lastgroup in {"note", "blank"} else piece
    return STARTING_AWK.search("".join(code) + program[at:]) is not None


def _sed_starts_programs(program: str) -> bool:
    """Return whether a sed program runs commands, if delimiters in brackets end a pattern or do not."""
    return any(STARTING_SED.search(text) for text in {program, SED_BRACKETS.sub("_", program)})


def _is_only_expansion(code: str) -> bool:
    """Return whether a code consists only of a shell expansion or placeholder, as in ``python -c "$X"``."""
    text = code.removesuffix(EXPANSION)
    return code in {ADDED_WORDS, PLACEHOLDER} or (
        text != code and (text in {"$", "`"} or PARAMETER.fullmatch(text) is not None)
    )


def _derive_from_perl_pipes(words: Argv) -> Iterator[_Derived]:
    """Yield the commands in Perl's arguments with a pipe at the start or end; ``<>`` starts them to read their output."""
    for word in map(str.strip, words[1:]):
        if word[:1] == "|" or word[-1:] == "|":
            yield from [_Derived(line, is_possible=True) for line in _parse_shell_line(word.strip("|"))]


def _exports_variables(words: Sequence[str]) -> bool:
    """Return whether a command of a script exports variables to the programs that the script starts."""
    if words[0] == "set":
        return any(word == "allexport" or (word[:1] == "-" and "a" in word) for word in words[1:])
    return words[0] in {"export", "declare", "typeset"}


def _is_known_program(name: str) -> bool:
    """Return whether one of the tables contains a program."""
    return any(name in table for table in (PROGRAMS, SEARCHES, GITS, TEXT_PROGRAMS))


def _runs_script_files(name: str) -> bool:
    """Return whether a program runs files that are its arguments, as shells and interpreters do."""
    return name in {".", "source"} or name in CODE or (name in WRAPPERS and WRAPPERS[name].rest == "shell")


def _get_file_name(word: str) -> str:
    """Return the last component of a path, without the mark of an expansion."""
    return word.rstrip(EXPANSION).rpartition("/")[2]


def _find_files_to_run(name: str, words: Argv) -> list[str]:
    """Return the words of a command that may name a file to run; for an unknown program, all its words."""
    if name in FILE_OPTIONS:
        return list(_find_option_values(FILE_OPTIONS[name], words[1:]))
    return list(words) if _runs_script_files(name) or not _is_known_program(name) else []


def _find_files_written_by_programs(script: ParsedScript) -> list[str]:
    """Return the words that name files in which programs of a script may store text of the script, such as operands of ``tee``."""
    commands = [words for simple in script.commands for words in _unwrap_commands(simple.words)]
    found = [name for words in commands for name in _find_output_files(words)]
    # A copy of a written file has its text.
    names = set(map(_get_file_name, (*script.written, *found)))
    for words in commands:
        if _get_program_table_key(words[0]) in COPYING and not names.isdisjoint(map(_get_file_name, words[1:])):
            names.update(map(_get_file_name, filter(_is_operand, words[1:])))
    return list(names)


def _find_output_files(words: Argv) -> list[str]:
    """Return the words of a command that name files to which it writes its input or a text in its code."""
    name = _get_program_table_key(words[0])
    if name in {"sponge", "tee"}:
        return list(filter(_is_operand, words[1:]))
    if name == "dd":
        return [word.removeprefix("of=") for word in words if word.startswith("of=")]
    # Of an interpreter the names within its code, and not the operands.
    codes = [word for word in words[1:] if STORING_CODE.search(word)] if name in CODE or name in TEXT_PROGRAMS else []
    return [part for code in codes for part in WORD.findall(code) if part != code]


def _runs_standard_input(name: str, words: Argv) -> bool:
    """Return whether a program runs its standard input: an interpreter without a file, ``ssh`` without a command, ``make -f -``."""
    operands = [word for word in words[1:] if _is_operand(word)]
    if name in {"-", "at", "batch"}:
        return True
    if name in TEXT_PROGRAMS or name in COMMAND_FILES:
        options = COMMAND_FILES.get(name, ("-f", "--file"))
        has_file = any(value == "-" or value.startswith(INPUTS) for value in _find_option_values(options, words[1:]))
        return has_file or name == "ex" or (name in DEBUGGERS and not {"-batch", "--batch"} & set(words))
    if name in CODE:
        has_code = any(True for _ in _find_option_values([*CODE[name].split(), "-m"], words[1:]))
        operands = operands[1:] if name in {"bun", "deno"} and operands[:1] == ["run"] else operands
        return not has_code and (not operands or operands[0] == "-") and not set(words[1:]) & SAYS_VERSION
    if name in STARTING_SHELLS:
        return _starts_shell_without_command(name, words, operands)
    reads_lines = name == "parallel" or (name in WRAPPERS and WRAPPERS[name].rest == "line" and name != "trap")
    return reads_lines and not _find_command_starts(WRAPPERS[name], words, 1)


def _starts_shell_without_command(name: str, words: Argv, operands: Sequence[str]) -> bool:
    """Return whether a wrapper starts a shell because no command follows it."""
    wrapper = WRAPPERS[name]
    if set(words[1:]) & SAYS_VERSION:
        return False
    if name in {"doas", "sudo", "systemd-run"} and not any(ASKS_FOR_SHELL.fullmatch(word) for word in words[1:]):
        return False
    if wrapper.rest == "command":
        # A word such as the architecture may be missing before the command.
        return len(_find_command_starts(wrapper, words, 1)) <= wrapper.operands[1] - wrapper.operands[0]
    has_command = any(True for _ in _find_option_values(["-c", "--command", "--run", "--session-command"], words[1:]))
    return not has_command and len(operands) < STARTING_SHELLS[name]


def _derive_from_each_word(
    words: Sequence[str], may_start_command: Callable[[str], bool] = _is_operand
) -> Iterator[_Derived]:
    """Yield a command from each word on that *may_start_command*, and the commands in words that are whole lines."""
    for at, word in enumerate(words):
        if word and may_start_command(word):
            yield _Derived(tuple(words[at:]), is_guess=True)
        if any(char.isspace() for char in word):
            yield from [
                _Derived(line, is_guess=may_start_command is not _is_operand) for line in _parse_shell_line(word)
            ]


def _names_program_starter(word: str) -> bool:
    """Return whether a word names a program that starts others."""
    name = _get_program_table_key(word)
    return name in CODE or name in SEARCHES or name in GITS or (name in PROGRAMS and name not in QUIET)


def _derive_from_exec_options(options: Sequence[str], words: Argv) -> Iterator[_Derived]:
    """Yield the command after each of *options*, such as ``-exec`` of ``find``."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        letter = LETTERS.match(word)
        if name in options:
            rest = (value, *words[at + 1 :]) if equals else words[at + 1 :]
        elif letter and f"-{letter[1]}" in options:  # `-Hx`
            rest = (letter[2], *words[at + 1 :]) if letter[2] else words[at + 1 :]
        else:
            continue
        end = next((end for end, other in enumerate(rest) if other in {";", "+"}), len(rest))
        if rest[:end] and rest[0]:
            yield _Derived(rest[:end])
            # The names that it finds start with a folder or file that it searches, which may be a word of the rule.
            for start in takewhile(_is_operand, words[1:]) if PLACEHOLDER in rest[1:end] else ():
                yield _Derived(tuple([start if one == PLACEHOLDER else one for one in rest[:end]]))


WITH_SUBCOMMANDS = frozenset(
    [" ".join(key.split()[:length]) for key in WRAPPERS for length in range(1, len(key.split()))]
)
