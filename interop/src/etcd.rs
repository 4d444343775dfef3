//! etcd out of its root: one member or several, on loopback, with a directory of their own.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::qemu::PATIENCE;
use crate::{Failure, Root};

/// A cluster that runs.
pub struct Etcd {
    root: Root,
    directory: TempDir,
    certificates: Option<PathBuf>,
    members: Vec<Member>,
}

struct Member {
    process: Option<Child>,
    /// For clients without TLS, with TLS, and for other members.
    ports: [u16; 3],
}

impl Etcd {
    /// Starts a cluster; if there is no root, `test` is said to be skipped. Each member listens without TLS, and with
    /// `certificates` also with TLS: then clients must show a certificate. That directory has
    /// QEMU's names for its files, and `gateway-cert.pem` with its key for etcd's gateway, which is a client of etcd.
    ///
    /// # Errors
    /// etcd does not run.
    pub fn start_for(
        test: &str,
        members: usize,
        certificates: Option<&Path>,
    ) -> Result<Option<Self>, Failure> {
        let Some(root) = Root::etcd_for(test) else { return Ok(None) };
        let directory = tempfile::Builder::new().prefix("sterna-").tempdir().map_err(|e| e.to_string())?;
        let ports = free_ports(members * 3).map_err(|error| error.to_string())?;
        let members =
            ports.chunks(3).map(|ports| Member { process: None, ports: [ports[0], ports[1], ports[2]] });
        let certificates = certificates.map(Path::to_path_buf);
        let mut etcd = Self { root, directory, certificates, members: members.collect() };
        (0..etcd.members.len()).try_for_each(|at| etcd.spawn(at))?;
        (0..etcd.members.len()).try_for_each(|at| etcd.wait_until_it_answers(at))?;
        Ok(Some(etcd))
    }

    /// The address of a member.
    pub fn url(&self, at: usize) -> String {
        format!("http://127.0.0.1:{}", self.members[at].ports[0])
    }

    /// The address of a member for TLS.
    pub fn tls_url(&self, at: usize) -> String {
        format!("https://127.0.0.1:{}", self.members[at].ports[1])
    }

    /// Kills a member at once.
    pub fn kill(&mut self, at: usize) {
        if let Some(mut process) = self.members[at].process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts a member again that was killed.
    ///
    /// # Errors
    /// It does not run.
    pub fn start_again(&mut self, at: usize) -> Result<(), Failure> {
        self.spawn(at)?;
        self.wait_until_it_answers(at)
    }

    /// Posts JSON to the first member, without TLS, and gives back the answer's body.
    ///
    /// # Errors
    /// Another answer than success.
    pub fn post(&self, path: &str, body: &str) -> Result<String, Failure> {
        post(self.members[0].ports[0], path, body)
    }

    fn spawn(&mut self, at: usize) -> Result<(), Failure> {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let peers: Vec<String> = self
            .members
            .iter()
            .enumerate()
            .map(|(n, member)| format!("m{n}={}", url(member.ports[2])))
            .collect();
        let [plain, tls, peer] = self.members[at].ports;
        let mut clients = url(plain);
        let mut command = self.root.command("etcd");
        if let Some(certificates) = &self.certificates {
            clients = format!("{clients},https://127.0.0.1:{tls}");
            command.arg("--client-cert-auth");
            // etcd's gateway is a client of etcd.
            for (option, file) in [
                ("--cert-file", "server-cert.pem"),
                ("--key-file", "server-key.pem"),
                ("--trusted-ca-file", "ca-cert.pem"),
                ("--client-cert-file", "gateway-cert.pem"),
                ("--client-key-file", "gateway-key.pem"),
            ] {
                command.arg(option).arg(certificates.join(file));
            }
        }
        let name = format!("m{at}");
        let log = self.directory.path().join(format!("{name}.log"));
        let log = std::fs::File::options().create(true).append(true).open(log).map_err(|e| e.to_string())?;
        command.args(["--name", &name, "--logger", "zap", "--log-level", "warn"]);
        command.arg("--data-dir").arg(self.directory.path().join(&name));
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)]);
        command.args(["--initial-cluster", &peers.join(","), "--heartbeat-interval", "50"]);
        command.args(["--election-timeout", "500"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = command.spawn().map_err(|error| format!("etcd: {error}"))?;
        self.members[at].process = Some(process);
        Ok(())
    }

    fn wait_until_it_answers(&mut self, at: usize) -> Result<(), Failure> {
        let begin = Instant::now();
        // A majority has to agree before it reads.
        while let Err(why) = post(self.members[at].ports[0], "/v3/kv/range", r#"{"key":"AA=="}"#) {
            let ended =
                self.members[at].process.as_mut().and_then(|process| process.try_wait().ok().flatten());
            // A cluster that demands users is there, too.
            if why.contains("user name is empty") {
                break;
            }
            if ended.is_some() || begin.elapsed() > PATIENCE {
                let log = std::fs::read_to_string(self.directory.path().join(format!("m{at}.log")));
                return Err(format!("etcd does not run ({why}): {}", log.unwrap_or_default().trim()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

/// Taken all at once, so that no two are the same, and free again.
fn free_ports(count: usize) -> std::io::Result<Vec<u16>> {
    let bound: Vec<_> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    bound.iter().map(|socket| Ok(socket.local_addr()?.port())).collect()
}

fn post(port: u16, path: &str, body: &str) -> Result<String, Failure> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(text)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(text)?;
    let length = body.len();
    write!(stream, "POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}")
        .map_err(text)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(text)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    if head.split(' ').nth(1) == Some("200") { Ok(body.to_owned()) } else { Err(format!("{path}: {answer}")) }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|at| self.kill(at));
    }
}
