//! `sterna relay` as a service of systemd: its sockets, its news, and the units in `dist/`.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{PATIENCE, Relay, exchange, pair};

/// A relay to which this process passes a listening socket as systemd does, and gets its news.
fn activated(listener: UnixListener, notify: &Path, names: &str, arguments: &[&str]) -> Command {
    // The shell's number is the relay's, because it is replaced.
    let script = "export LISTEN_PID=$$; exec \"$0\" relay \"$@\" 3<&0 </dev/null";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_sterna")]).args(arguments);
    command.env("LISTEN_FDS", "1").env("LISTEN_FDNAMES", names).env("NOTIFY_SOCKET", notify);
    command.stdin(Stdio::from(OwnedFd::from(listener))).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// The next message to systemd.
fn news(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let length = socket.recv(&mut bytes).unwrap();
    String::from_utf8(bytes[..length].to_vec()).unwrap()
}

#[test]
fn relay_takes_its_socket_from_systemd_and_tells_its_state() {
    let directory = tempfile::tempdir().unwrap();
    let (path, notify) = (directory.path().join("vmm.sock"), directory.path().join("notify"));
    let socket = UnixDatagram::bind(&notify).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let (dialer, acceptor, target) = pair(directory.path(), &[], &[]);
    drop(dialer);
    let to = format!("{}/web1", acceptor.address);
    let listener = UnixListener::bind(&path).unwrap();
    let arguments = ["listen:systemd:vmm", "--to", &to, "--kind", "raw"];
    let relay = Relay::of_command(activated(listener, &notify, "vmm", &arguments));
    assert_eq!(news(&socket), "READY=1\nSTATUS=no session is open");
    assert_eq!(relay.address, format!("unix:{}", path.display()));

    let source = UnixStream::connect(&path).unwrap();
    let (target, _) = target.accept().unwrap();
    [&source, &target].into_iter().for_each(|end| end.set_read_timeout(Some(PATIENCE)).unwrap());
    let mut status = news(&socket);
    while !status.contains("route web1") {
        status = news(&socket);
    }
    assert!(status.starts_with("STATUS=session "), "{status}");
    relay.signal();
    let mut stopping = news(&socket);
    while !stopping.starts_with("STOPPING=1\n") {
        stopping = news(&socket);
    }
    assert!(stopping.contains("route web1"), "{stopping}");
    exchange((source, target));

    let (status, said) = relay.end();
    assert_eq!(status, Some(0), "{said}");
    assert!(path.exists(), "systemd's socket stays");
}

#[test]
fn socket_that_systemd_did_not_pass_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("s")).unwrap();
    let arguments = ["listen:systemd:other", "--route", "a=unix:/x"];
    let output = activated(listener, Path::new(""), "vmm", &arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("the sockets vmm"), "{said}");

    let (status, said) = super::refused(&["listen:systemd", "--route", "a=unix:/x"]);
    assert!(status == Some(2) && said.contains("passed no socket"), "{status:?} {said}");
    let (end, _other) = UnixStream::pair().unwrap();
    let connected = UnixListener::from(OwnedFd::from(end));
    let output =
        activated(connected, Path::new(""), "vmm", &["listen:systemd", "--route", "a=unix:/x"]).output();
    let said = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(said.contains("does not listen"), "{said}");
}

#[test]
fn socket_of_systemd_that_other_hosts_reach_needs_proof_as_any_other() {
    let directory = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let listener = UnixListener::from(OwnedFd::from(listener));
    let route = format!("a=unix:{}", directory.path().join("x").display());
    let output =
        activated(listener, Path::new(""), "vmm", &["listen:systemd", "--route", &route]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("--insecure"), "{said}");
}

#[test]
fn units_are_what_systemd_accepts() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        #[allow(clippy::print_stderr)]
        {
            eprintln!("SKIPPED units_are_what_systemd_accepts: systemd-analyze is not installed");
        }
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist");
    let mut units = Vec::new();
    for entry in std::fs::read_dir(dist).unwrap() {
        let from = entry.unwrap().path();
        // The program is not installed at the place that the units name.
        let text =
            std::fs::read_to_string(&from).unwrap().replace("/usr/bin/sterna", env!("CARGO_BIN_EXE_sterna"));
        let name = from.file_name().unwrap().to_str().unwrap().to_owned();
        std::fs::write(directory.path().join(&name), &text).unwrap();
        if name.ends_with(".service") {
            // Every option of the command line exists.
            let start = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
            let options: Vec<&str> = start.split(' ').filter(|word| word.starts_with("--")).collect();
            let help = Command::new(env!("CARGO_BIN_EXE_sterna")).args(["relay", "--help"]).output().unwrap();
            let help = String::from_utf8(help.stdout).unwrap();
            assert!(!options.is_empty() && options.iter().all(|option| help.contains(option)), "{options:?}");
            units.push(name);
        }
    }
    assert_eq!(units.len(), 2);
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args(&units)
        .current_dir(&directory)
        .output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // Units of this machine that have nothing to do with the relay may have faults.
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("sterna")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
}
