//! The order of a guest's frames while the gates of a protection are removed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, Sender, channel};

use serde_json::{Value, json};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Failure, NUMBER_ADDRESS, Qemu, Root, sterna};

use super::command::Protect;
use super::lab::{Lab, wait};

/// A monitor's socket that holds one command back.
struct Between {
    socket: PathBuf,
    /// Gets a message when the command has arrived.
    came: Receiver<()>,
    /// Lets the command pass.
    go: Sender<()>,
}

impl Between {
    /// Forwards a client of `monitor`, and holds the first command back that contains all of `words`.
    fn new(directory: &Path, monitor: PathBuf, words: &'static [&'static str]) -> Result<Self, Failure> {
        let socket = directory.join("between");
        let listener = UnixListener::bind(&socket).map_err(|error| error.to_string())?;
        let ((tell, came), (go, gone)) = (channel(), channel());
        std::thread::spawn(move || -> std::io::Result<()> {
            let (near, _) = listener.accept()?;
            let far = UnixStream::connect(monitor)?;
            let (mut from, mut to) = (far.try_clone()?, near.try_clone()?);
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let mut is_held = false;
            for line in BufReader::new(near).lines() {
                let line = line?;
                if !is_held && words.iter().all(|word| line.contains(word)) {
                    is_held = true;
                    // An error means that the test has ended.
                    let _ = tell.send(());
                    let _ = gone.recv();
                }
                writeln!(&far, "{line}")?;
            }
            far.shutdown(std::net::Shutdown::Both)
        });
        Ok(Self { socket, came, go })
    }
}

/// The number of the last frame that the guest has sent.
fn number(qemu: &mut Qemu) -> Result<u32, Failure> {
    let line = json!({"command-line": format!("xp /1wx {NUMBER_ADDRESS:#x}")});
    let answer = qemu.execute("human-monitor-command", line)?;
    let text = answer.as_str().unwrap_or_default();
    let word = text.trim().rsplit("0x").next().ok_or("no number")?;
    u32::from_str_radix(word, 16).map_err(|error| format!("{error}: {text:?}"))
}

fn wait_for_frames(qemu: &mut Qemu, count: u32) -> Result<(), Failure> {
    let until = number(qemu)? + count;
    wait("more frames", || match number(qemu) {
        Ok(now) => (now >= until).then_some(Ok(())),
        Err(error) => Some(Err(error)),
    })?
}

/// The command does not run while QEMU removes the filter that leads into the gate. So the gate still has frames when
/// later ones need not pass through it.
#[test]
fn frames_keep_their_order_when_a_gate_is_removed_by_a_command_that_is_slow() -> Result<(), Failure> {
    let test = "frames_keep_their_order_when_a_gate_is_removed_by_a_command_that_is_slow";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let monitor = lab.primary.operator_socket();
    let between = Between::new(lab.directory.path(), monitor, &["object-del", "-hold"])?;
    let side = lab.standby(0)?;
    *side.arbiter.lock().map_err(|error| error.to_string())? = "ask".to_owned();
    let socket = format!("unix:{}", lab.directory.path().join("control").display());
    let mut process = sterna()
        .args(["protect", &format!("unix:{}", between.socket.display()), &side.stream()])
        .args(["--contact", &side.contact_address(), "--json", "--lease=600s", "--qmp", &socket])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
    let mut protect = Protect { process, lines, socket };
    protect.until_protected()?;
    lab.network.hear_more(10)?;

    let mut order = sterna();
    order.args(["unprotect", &protect.socket]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut order = super::command::Started(order.spawn().map_err(|error| error.to_string())?);
    between.came.recv_timeout(PATIENCE).map_err(|error| error.to_string())?;
    let id = rustix::process::Pid::from_child(&protect.process);
    let signal = |signal| rustix::process::kill_process(id, signal).map_err(|error| error.to_string());
    signal(rustix::process::Signal::STOP)?;
    wait_for_frames(&mut lab.primary, 1)?;
    between.go.send(()).map_err(|error| error.to_string())?;
    let is_there = |objects: &Value| objects.to_string().contains("-hold");
    wait("the filter's removal", || {
        let objects = lab.primary.execute("qom-list", json!({"path": "/objects"}));
        objects.is_ok_and(|objects| !is_there(&objects)).then_some(())
    })?;
    wait_for_frames(&mut lab.primary, 1)?;
    signal(rustix::process::Signal::CONT)?;

    assert_eq!(protect.end()?.code(), Some(0));
    wait("the order's end", || order.0.try_wait().ok().flatten())?;
    lab.network.hear_more(20)
}
