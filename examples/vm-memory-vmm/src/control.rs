//! The control socket. A command is one line, and its answer is one line (`ok`, `ok …` or `error:
//! …`).
//!
//! | command | does |
//! | --- | --- |
//! | `migrate ADDRESS` | starts a migration of the guest to `tcp:HOST:PORT` or `unix:PATH` |
//! | `cancel` | cancels the migration; the guest continues here |
//! | `save FILE` | starts to save the guest, which stops |
//! | `resume` | resumes a saved guest |
//! | `plug MIB` | plugs memory; refused during a migration and before a guest has arrived |
//! | `read ADDRESS`, `write ADDRESS NUMBER` | reads or writes a number in guest memory, as a device does |
//! | `listen ADDRESS` | waits for a guest, after `--incoming defer` |
//! | `limit BYTES` | limits the bandwidth, in bytes per second |
//! | `status` | reports the state of the migrations and of the guest |
//! | `quit` | ends the process, unless a migration runs |
//!
//! One thread serves the socket and the device's timer. It never waits for a migration.

use std::collections::HashMap;
use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::timerfd::TimerFd;

use crate::machine::Machine;
use crate::migrator::Migrator;

const TICK: Duration = Duration::from_millis(5);
/// Largest length of a command line in bytes.
const LINE_BYTES: usize = 4096;

/// Serves the socket until a client sends `quit`.
pub fn run(path: &Path, machine: &Machine, migrator: &mut Migrator) -> Result<(), Box<dyn Error>> {
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    let mut timer = TimerFd::new()?;
    timer.reset(TICK, Some(TICK))?;
    let epoll = Epoll::new()?;
    let add = |fd: RawFd| epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, fd as u64));
    add(listener.as_raw_fd())?;
    add(timer.as_raw_fd())?;
    let mut clients = HashMap::new();
    let mut events = [EpollEvent::default(); 16];
    loop {
        let count = match epoll.wait(-1, &mut events) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            count => count?,
        };
        for event in &events[..count] {
            let fd = event.data() as RawFd;
            if fd == timer.as_raw_fd() {
                timer.wait()?;
                machine.ticker().tick(&machine.memory())?;
            } else if fd == listener.as_raw_fd() {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                add(stream.as_raw_fd())?;
                clients.insert(stream.as_raw_fd(), Client { stream, buffer: Vec::new() });
            } else if let Some(client) = clients.get_mut(&fd) {
                match client.serve(&mut |line| answer(line, machine, migrator)) {
                    ControlFlow::Continue(true) => {}
                    ControlFlow::Continue(false) => drop(clients.remove(&fd)), // The close removes it from the epoll.
                    ControlFlow::Break(()) => return Ok(()),
                }
            }
        }
    }
}

struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Client {
    /// Answers the lines that have arrived. Continues with whether the client stays; breaks after `quit`.
    fn serve(&mut self, answer: &mut dyn FnMut(&str) -> Option<String>) -> ControlFlow<(), bool> {
        let mut bytes = [0; 1024];
        let count = match self.stream.read(&mut bytes) {
            Ok(0) => return ControlFlow::Continue(false),
            Ok(count) => count,
            Err(error) => return ControlFlow::Continue(error.kind() == ErrorKind::WouldBlock),
        };
        self.buffer.extend_from_slice(&bytes[..count]);
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            let reply = answer(String::from_utf8_lossy(&line).trim());
            let text = reply.as_deref().unwrap_or("ok");
            let written = self.stream.write_all(format!("{text}\n").as_bytes());
            if reply.is_none() {
                return ControlFlow::Break(());
            } else if written.is_err() {
                return ControlFlow::Continue(false);
            }
        }
        ControlFlow::Continue(self.buffer.len() <= LINE_BYTES)
    }
}

/// Executes the command in a line and returns the answer; `None` means quit.
fn answer(line: &str, machine: &Machine, migrator: &mut Migrator) -> Option<String> {
    let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
    let done = match command {
        "migrate" => migrator.migrate(argument),
        "cancel" => migrator.cancel(),
        "save" => migrator.save(Path::new(argument)),
        "resume" => migrator.resume(),
        "listen" => migrator.listen(argument),
        "plug" => argument.parse().map_err(Into::into).and_then(|mib: usize| migrator.plug(mib << 20)),
        "write" => write(argument, machine),
        "read" => match read(argument, machine) {
            Ok(number) => return Some(format!("ok {number}")),
            Err(error) => Err(error),
        },
        "limit" => argument.parse().map_err(Into::into).and_then(|bytes| migrator.limit(bytes)),
        "status" => {
            let runs = if machine.vcpu().is_running() { "running" } else { "stopped" };
            return Some(format!(
                "ok {} guest {runs} printed {}",
                migrator.status(),
                machine.vcpu().printed()
            ));
        }
        "quit" if migrator.is_idle() => return None,
        "quit" => Err("a migration runs, or the guest's whereabouts are undecided: cancel it first".into()),
        _ => Err(
            "commands are migrate, cancel, save, resume, listen, plug, read, write, limit, status and quit"
                .into(),
        ),
    };
    Some(done.map_or_else(|error| format!("error: {error}"), |()| "ok".into()))
}

fn read(address: &str, machine: &Machine) -> Result<u64, Box<dyn Error>> {
    Ok(machine.memory().read_obj(GuestAddress(address.parse()?))?)
}

fn write(argument: &str, machine: &Machine) -> Result<(), Box<dyn Error>> {
    let (address, number) = argument.split_once(' ').ok_or("write ADDRESS NUMBER")?;
    Ok(machine.memory().write_obj(number.parse::<u64>()?, GuestAddress(address.parse()?))?)
}
