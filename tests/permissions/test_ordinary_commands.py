"""
Ordinary command lines, from guides, workflows and makefiles, beside rules that deny one program.
"""

from __future__ import annotations

import pytest

from stepengine.data.json import freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.permissions import Policy, Request, Rule

RUNS = ToolSpec("run_terminal_command", category="execute")

LINES = r"""
git status
npm test
python script.py --input data.csv --output out.csv
docker exec -it web bash
docker run --rm app pytest
timeout 60 pytest -x
uv run pytest -q
sudo systemctl restart nginx
sh ./install.sh
time make
kubectl exec -it web -- ls
git log --oneline | head -5
git add -A && git commit -m "Fix the parser"
git fetch origin && git rebase origin/main
git pull --rebase
git stash && git checkout main && git stash pop
git ls-files | xargs wc -l
git ls-files '*.py' | xargs grep -n TODO
git rm --cached config.ini
git branch --merged | grep -v main
git -C subdir status
git -c core.pager=cat log -3
git diff > /tmp/changes.patch
VERSION=$(git describe --tags) && echo "$VERSION"
echo "Current branch: $(git branch --show-current)"
for f in $(git diff --name-only); do wc -l "$f"; done
cd src && git status
npm ci && npm run build --if-present && npm test
npm rm lodash
node -e "console.log(process.version)"
pip install -e '.[dev]'
python -m venv .venv && source .venv/bin/activate && pip install -r requirements.txt
pip install git+https://github.com/psf/requests.git
uv pip install -e ".[test]"
python -m pytest tests/ -v --tb=short 2>&1 | head -100
python -c "import sys; print(sys.version)"
python -c "import re; print(re.compile('a+').findall('aa'))"
python -c "import json; print(json.load(open('a.json'))['evaluation'])"
cat data.json | python3 -c "import json,sys; print(json.load(sys.stdin)['name'])"
export PATH="$HOME/.local/bin:$PATH" && poetry --version
docker rm old
docker rm -f $(docker ps -aq)
docker inspect web | jq '.[0].State'
make -j$(nproc)
mkdir -p build && cd build && cmake .. && make
sed -i 's/foo/bar/g' src/app.py
sed 's/[[:space:]]*$//' file | sort -u
sed -n '/start/,/end/p' file
awk '{print $1}' file
awk -F: '{print $1}' /etc/passwd
awk '/error|warning/ {print FILENAME": "$0}' build.log
grep -rn "git" docs | head
grep -rni "rm -rf" . --include='*.sh'
grep -E 'curl|wget' Dockerfile
rg -n "push" src | head -20
find . -name '*.py' | xargs grep -l import
find . -type d -name __pycache__ -exec rm -r {} +
find . -type f -exec grep -l "git push" {} +
find . -type f -size +10M -print0 | xargs -0 ls -lh
curl -fsSL https://example.org/data.json -o data.json
curl -s https://api.github.com/repos/psf/requests | jq .stargazers_count
curl -I https://example.org
curl -X POST -H 'Content-Type: application/json' -d '{"a": 1}' http://localhost:8000/api
curl http://localhost:8000/health && echo ok
apt-get update && apt-get install -y git curl build-essential
sudo apt-get update && sudo apt-get install -y curl
which curl
which git && git --version
command -v curl >/dev/null 2>&1 || echo "curl is missing"
type rm
man git
git help push
git push --help
rm -rf build
rm -f *.pyc
rm -rf node_modules && npm ci
rm old.txt; touch new.txt
cp -r src dst && rm -r src
wc -l $(find . -name '*.py')
diff <(sort a) <(sort b)
echo "hello" > hello.txt
echo "do not git push" >> notes.txt
cd /tmp && ls
export FOO=bar; echo $FOO
sleep 2 && curl -s localhost:8000
kill $(lsof -t -i:3000)
chmod +x script.sh && ./script.sh
for i in 1 2 3; do echo $i; done
for f in *.py; do python -m py_compile "$f"; done
while read -r line; do echo "$line"; done < file.txt
if [ -f .env ]; then cat .env; fi
nohup python server.py > server.log 2>&1 &
python server.py & sleep 2; curl -s localhost:8000; kill %1
(cd frontend && npm ci && npm run build)
set -e; make; make test
bash -c "npm ci && npm test"
ssh user@host 'uptime'
psql -h localhost -U postgres -c "delete from rm"
kubectl get pods -n git
aws s3 rm s3://bucket/key
gh pr create --title "Fix git push" --body "See rm"
jq -r '.dependencies | keys[]' package.json
cat list.txt | xargs -I{} mkdir -p {}
ls *.log | xargs rm
base64 -d file.b64 > file.bin
""".strip().split("\n")
SCRIPTS = [
    "git commit -m \"$(cat <<'EOF'\nExplain how to push\n\nThe page names git push and rm.\nEOF\n)\"",
    "python - <<'EOF'\nimport json\nprint(json.dumps({\"a\": 1}))\nEOF",
    "cat > config.ini <<EOF\n[remote]\nurl = https://github.com/a/b.git\nEOF",
    "cat <<EOF > deploy.md\nRun git push and then curl the page, then rm the file.\nEOF",
]
ASKED: dict[tuple[str, ...], dict[str, str]] = {
    ("git", "push"): {
        "docker exec -it web bash": "a shell without a script runs what is typed",
        "git push --help": "it runs git push",
    },
    ("rm",): {
        "docker exec -it web bash": "a shell without a script runs what is typed",
        "find . -type d -name __pycache__ -exec rm -r {} +": "it runs rm",
        "rm -rf build": "it runs rm",
        "rm -f *.pyc": "it runs rm",
        "rm -rf node_modules && npm ci": "it runs rm",
        "rm old.txt; touch new.txt": "it runs rm",
        "cp -r src dst && rm -r src": "it runs rm",
        'psql -h localhost -U postgres -c "delete from rm"': "psql is not known, and may start the program that its words name",
        "ls *.log | xargs rm": "it runs rm",
    },
    ("curl",): {
        "docker exec -it web bash": "a shell without a script runs what is typed",
        "curl -fsSL https://example.org/data.json -o data.json": "it runs curl",
        "curl -s https://api.github.com/repos/psf/requests | jq .stargazers_count": "it runs curl",
        "curl -I https://example.org": "it runs curl",
        "curl -X POST -H 'Content-Type: application/json' -d '{\"a\": 1}' http://localhost:8000/api": "it runs curl",
        "curl http://localhost:8000/health && echo ok": "it runs curl",
        "sleep 2 && curl -s localhost:8000": "it runs curl",
        "python server.py & sleep 2; curl -s localhost:8000; kill %1": "it runs curl",
    },
}
"""The ones that may be asked about or denied, by what a rule denies, each with the reason."""


def check(command: str, *denied: str) -> str:
    policy = Policy([Rule.deny_command(denied), Rule.allow_tool("run_terminal_command")])
    return policy.check(Request(tool=RUNS, input=freeze_object({"command": command}))).decision


@pytest.mark.spec("reliability:PM52")
@pytest.mark.parametrize("denied", ASKED, ids=" ".join)
def test_ordinary_commands_run_unasked_beside_a_deny(denied: tuple[str, ...]) -> None:
    stopped = [command for command in (*LINES, *SCRIPTS) if check(command, *denied) != "allow"]

    assert sorted(ASKED[denied]) == sorted(stopped)


HARMLESS = [
    "git status && git diff", "cd src && git status", "cd x && git stash push", 'grep -rn "git push" docs | head', "echo git push; ls", "cat git | wc -l", "apt-get install git", "git log | cat",
    "python -c 'import re; re.compile(\"a\")'", "git commit -m 'git push' && git log", "./build.sh && git status", "VERSION=git; make", "grep $'\\t' f; git log", "(cd a && git log) | head", "git log $REF | head",
    'git -C "$DIR" status && ls', "make -f rules.mk; git log", "ls 2>&- ; git log", "git log 2>&1 | tee log", "cat <<-E\n\tgit push\n\tE\ngit log", "python manage.py check && git add -A", "echo $((1 + (2 * 3))); git log",
    "case $x in a) git log;; esac", "sh build.sh > log; git add log", "python x.py > out.txt && git diff", "sed 's/a/b/' docs/example.md | sed -e s/a/b/ e.txt", "awk '$1 ~ /a|b/ {print \"x|y\"}' f",
    "sed '/x/a\\\nexport A=1' f", "FOO=$BAR make && git log", "command -v git && git log", "python3 -c 'import ast; ast.literal_eval(x)'", "echo x | jq . && git log", "git log | less +G",
]  # fmt: skip

USUAL = [
    "git diff --name-only | xargs git add", "git branch --merged | xargs git branch -d", "xargs -a files.txt git add", "ls | xargs -I{} git -C {} pull",
    "ls | parallel git add", "awk '{print $1 \"|\" $2}' f", "awk '{if ($1==\"x\" || $2==\"y\") print}' f", "awk '{print $1 / $2 \"|\" $3 # a | b\n}' f",
    "awk '/[0-9]|x/ {print}' f", "python -c \"import importlib.metadata as m; print(m.version('httpx'))\"", "python -c 'import platform; print(platform.system())'",
    "find . -name '*.pyc' -exec rm {} +", "ctest --output-on-failure", "coverage run -m pytest", "hatch run test:cov", "meson test -C build",
    "tox -x testenv.recreate=true", "yarn workspace app test", "pnpm recursive run build", "dotnet test -p:Configuration=Release", "cargo +nightly build",
    "tar cIf zstd a.tar x", "fd -Hx ls", "go test -exec=wine ./...", "sed 's/[/]/x/g;s/[e]/y/' f", "node --import tsx app.js", "perl -MPOSIX -e 'print floor(3.2)'",
    "ls | sudo tee x", "cat f | chroot / wc", "uv run - <<E\nprint(1)\nE", "cat f | unshare -r wc", "git diff | vim -", "cat f | script -qc 'wc -l' out", "echo x | su -c cat y", "ls | linux64 wc",
]  # fmt: skip
"""Uses of programs that can start others."""


@pytest.mark.spec("reliability:PM52")
def test_programs_that_can_start_others_do_ordinary_work_unasked() -> None:
    assert [] == [command for command in HARMLESS if check(command, "git", "push") != "allow"]
    for denied in (("git", "push"), ("rm", "-rf"), ("shutdown",)):
        assert [] == [command for command in USUAL if check(command, *denied) != "allow"], denied
