//! etcd from its root: one or several members on loopback, with a temporary directory.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::qemu::PATIENCE;
use crate::{Failure, Root};

/// How often a cluster is started with other ports.
const ATTEMPTS: u32 = 5;
/// etcd's words for a port that another program has.
const IN_USE: &str = "address already in use";

/// A running cluster of etcd members.
pub struct Etcd {
    root: Root,
    directory: TempDir,
    certificates: Option<PathBuf>,
    members: Vec<Member>,
}

struct Member {
    process: Option<Child>,
    /// Ports for clients without TLS, for clients with TLS, and for other members.
    ports: [u16; 3],
}

impl Etcd {
    /// Starts a cluster. Without the root, reports `test` as skipped. Each member listens without TLS. With
    /// `certificates`, it also listens with TLS and requires a client certificate. That directory has QEMU's
    /// names for its files, and `gateway-cert.pem` with its key for etcd's gateway, which is a client of
    /// etcd.
    ///
    /// # Errors
    /// If etcd does not start.
    pub fn start_for(
        test: &str,
        members: usize,
        certificates: Option<&Path>,
    ) -> Result<Option<Self>, Failure> {
        // Between the choice of a port and etcd's use of it, another program may take the port.
        let mut tried = Self::try_start(test, members, certificates);
        for _ in 1..ATTEMPTS {
            match &tried {
                Err(why) if why.contains(IN_USE) => tried = Self::try_start(test, members, certificates),
                _ => break,
            }
        }
        tried
    }

    fn try_start(test: &str, members: usize, certificates: Option<&Path>) -> Result<Option<Self>, Failure> {
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

    /// The URL of a member without TLS.
    pub fn url(&self, at: usize) -> String {
        format!("http://127.0.0.1:{}", self.members[at].ports[0])
    }

    /// The URL of a member with TLS.
    pub fn tls_url(&self, at: usize) -> String {
        format!("https://127.0.0.1:{}", self.members[at].ports[1])
    }

    /// Kills a member immediately.
    pub fn kill(&mut self, at: usize) {
        if let Some(mut process) = self.members[at].process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Restarts a member that was killed.
    ///
    /// # Errors
    /// If the member does not start.
    pub fn start_again(&mut self, at: usize) -> Result<(), Failure> {
        self.spawn(at)?;
        self.wait_until_it_answers(at)
    }

    /// Posts JSON to the first member, without TLS, and returns the body of the answer.
    ///
    /// # Errors
    /// If the answer is not a success.
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
            // etcd's gateway is a client of etcd, so it needs a client certificate.
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
        // A read succeeds only after a majority of the members has agreed.
        while let Err(why) = post(self.members[at].ports[0], "/v3/kv/range", r#"{"key":"AA=="}"#) {
            let ended =
                self.members[at].process.as_mut().and_then(|process| process.try_wait().ok().flatten());
            // A cluster that requires users also answers, but refuses this request.
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

/// Allocates all ports at the same time, so that they differ, and then frees them. A member that is killed and started again uses its
/// ports again; therefore they are none that the kernel gives to outgoing connections meanwhile.
fn free_ports(count: usize) -> std::io::Result<Vec<u16>> {
    /// Below `net.ipv4.ip_local_port_range`, which begins at 32768.
    const PORTS: std::ops::Range<u16> = 15_000..32_000;
    let mut bound = Vec::with_capacity(count);
    while bound.len() < count {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, fastrand::u16(PORTS))) {
            Ok(socket) => bound.push(socket),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
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
