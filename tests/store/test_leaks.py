"""What must not be stored with a run: secrets of every form, without false alarms on code."""

from __future__ import annotations

import subprocess

import pytest

from store.lineage.leaks import find_secret
from utils.storage.installation import ROOT

# A bar stands where the text is joined: this file must not look like a secret itself.
LONG = "wJalrXUtnFEMI/K7MDENG|/bPxRfiCYEXAMPLEKEY"
SECRETS = (
    f'AWS_SECRET_ACCESS|_KEY = "{LONG}"',
    f"aws_secret_access|_key={LONG}",
    'pass|word = "hunter2"',
    "pass|word = 'correct horse 4 staples'",
    "DB_PASS|WORD=s3cr3tpw",
    "export DB_PASS|WORD=letmeinnow",
    "DB_PASS|WORD: s3cr3tpw",
    "  pass|word: letmeinnow",
    "pass|wd = hunter22",
    'sec|ret = "abc123def456"',
    'sec|ret: str = "abcdefghij"',
    'client_sec|ret: Final[str] = "abcdefghij"',
    '"pass|word": "hunter2",',
    "{'api|_key': 'k3ykeykey'}",
    'os.environ["API_TO|KEN"] = "q1w2e3r4"',
    'connect(host, pass|word="hunter2")',
    'session.auth = ("to|ken", "abc123def")',
    "api-k|ey=0123456789",
    "https://host/path?api_k|ey=0123456789a",
    "run --pass|word hunter22 --fast",
    "<pass|word>hunter2</password>",
    "machine host login me pass|word hunter",
    'my_private_k|ey = """abc123def"""',
    "credenti|als = 'user;abc123'",
    'PASS|PHRASE = "abc+def"',
    'MAIL_P|WD = "abc+def"',
    "pass|word = p@ssw0rd!",
    'api_to|kens = "abc123def456"',
    'mypass|word2 = "my_pass|word_9"',
    "Authorization: Bea|rer abcdef",
    'headers = {"Authorization": "Bea|rer abc.def-123"}',
    "Authorization: Ba|sic dXNlcjpwYXNz",
    "curl -H 'bea|rer 0123456789abcdef'",
    "GOCSPX|-a1b2c3d4e5f6g7h8",
    "AIza|SyA1234567890abcdefghijklmnopqrstuv",
    "ya29|.a0AfH6SMBx1234567890abcdef",
    "eyJhbGciOiJIUzI1NiJ9|.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    "AKIA|ABCD1234EFGH5678",
    "ASIA|ABCD1234EFGH5678",
    "ghp_|a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2",
    "github_pat_|11ABCDEFG0abcdefghijkl_mnop",
    "glpat-|a1b2c3d4e5f6g7h8i9j0",
    "xoxb-|123456789012-abcdef",
    "hf_|x1x1x1x1x1x1x1x1x1x1x1x1x1x1x1x1x1",
    "sk-|proj-a1b2c3d4e5f6g7h8i9",
    "sk_|live_a1b2c3d4e5f6g7h8",
    "-----BEGIN RSA PRI|VATE KEY-----",
    "-----BEGIN OPENSSH PRI|VATE KEY-----",
    "-----BEGIN PRI|VATE KEY-----",
    "-----BEGIN PGP PRI|VATE KEY BLOCK-----",
    "https:|//me:hunter2@host/x",
    "redis:|//:hunter2@host/0",
    f'to|ken = (\n    "{LONG}"\n)',
    f'pass|word, user = [\n  "{LONG}"]',
)
HARMLESS = (
    "token = tokenizer.encode(text)[0]",
    "token = get_token()",
    "tokens = batch.tokens",
    "num_tokens: 512",
    "max_tokens = 1048576",
    "tokens: 1024, width: 3",
    "token_dtype: bfloat16",
    '"experts_per_token": "num_experts_per_tok"',
    "experts_per_token=group_of_8",
    'given = [(of_tokens, "float32")]',
    'tokenizer: "bert-base-uncased-2"',
    "password: str = ''",
    'password = ""',
    "password: SecretStr",
    "secret: string",
    "secret = None",
    "secret = secrets.token_hex(32)",
    "api_key = os.environ['API_KEY']",
    'api_key = os.environ.get("SERVICE_API_KEY", "")',
    'API_KEY_VARIABLE = "SERVICE_API_KEY"',
    'PASSWORD="$DB_PASSWORD"',
    "password: ${{ secrets.PASSWORD }}",
    'password = "<your password>"',
    'password = f"{user}"',
    'token = "xxxxxxxxxxxx"',
    "secret_of_the_loss = compute_hidden(x)",
    "TOKEN = re.compile(r'abc')",
    'raise ValueError("a password is needed")',
    "parser.add_argument('--token', help='who asks')",
    "Authorization: Bearer TOKEN",
    'f"Authorization: Bearer {token}"',
    "sha256 = 'abc'",
    "https://host/path@2",
    '{"cls_token", "dist_token", "pos_embed"}',
    'open("/etc/passwd", "r2d2")',
    "XLA_FLAGS=--xla_force_host_platform_device_count=4",
    "the password of a user, a token and the secret: all are hidden",
    f"digest = '{'0123456789abcdef' * 2}'",
)


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_found(text):
    text = text.replace("|", "")
    patch = "".join(f"+{line}\n" for line in text.split("\n"))
    assert find_secret(text) and find_secret(f"@@ -0,0 +1 @@\n{patch}")


@pytest.mark.parametrize("text", HARMLESS)
def test_code_that_mentions_secrets_is_not_refused(text):
    assert find_secret(f"+{text}") == ""


def test_no_file_of_the_project_is_refused():
    """Neither its sources nor what it has lately changed would keep a run from telling its own."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git repository")
    texts = {}
    for name in filter(None, done.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            texts[name] = content.decode("utf-8", errors="replace")
    assert len(texts) > 100
    assert {name: kind for name, text in texts.items() if (kind := find_secret(text))} == {}


@pytest.mark.parametrize(
    "piece",
    ["token", "token=", "a.b-", "password: x, ", "'secret':'", "--token a ", "eyJ.", "://a:"],
)
def test_the_search_takes_linear_time_on_any_text(piece):
    """A line as long as a whole patch: what grew with its square would not end here."""
    find_secret(piece * ((1 << 15) // len(piece)))
