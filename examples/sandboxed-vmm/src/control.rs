//! The event loop, and an operator's commands. A command is a line of standard input, and its answer a line of standard output that begins
//! with `ok` or `error:`.
//!
//! | command | does |
//! | --- | --- |
//! | `migrate ADDRESS` | starts a migration of the guest |
//! | `cancel` | cancels it; the guest continues here |
//! | `limit BYTES` | limits the bandwidth of this and later migrations, in bytes per second |
//! | `status` | reports the state of the migrations and of the guest |
//! | `quit` | ends the process |

use std::error::Error;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use kvm_ioctls::Kvm;
use sterna::{
    Address, Capabilities, Event, Incoming, Migration, Observer, Parameters, SettingLimits, SharedSettings,
    TargetVm, VmError,
};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::filters;
use crate::machine::Machine;
use crate::migratable::Migratable;

/// Interval of the device's ticks, in milliseconds.
const TICK_MS: i32 = 5;

type Done = Result<String, Box<dyn Error>>;
type Made = Result<Arc<dyn TargetVm>, VmError>;
type Guest = (Arc<Machine>, Arc<Migratable>);

/// A machine that the engine asks the event loop to make, and where the answer goes.
struct Order {
    configuration: Vec<u8>,
    answer: Sender<Made>,
}

/// The VMM. Only the event loop touches it.
pub struct Vmm {
    kvm: Kvm,
    guest: Option<Guest>,
    /// A machine that the engine has not claimed yet. No command may use it, because another guest will arrive there.
    made: Option<Guest>,
    parameters: Parameters,
    outgoing: Option<Migration>,
    /// Kept, because a source that lost the acknowledgement asks it for the guest's fate.
    incoming: Option<Incoming>,
    /// Readable when an order is in the channel.
    wake: EventFd,
    orders: (Sender<Order>, Receiver<Order>),
}

impl Vmm {
    /// A VMM without a machine. The process is locked in by now.
    pub fn new(kvm: Kvm) -> Result<Self, Box<dyn Error>> {
        let parameters = Parameters { on_thread_start: Some(filters::hook()?), ..Parameters::default() };
        let (wake, orders) = (EventFd::new(libc::EFD_NONBLOCK)?, channel());
        Ok(Self { kvm, guest: None, made: None, parameters, outgoing: None, incoming: None, wake, orders })
    }

    /// Starts a guest with this many MiB of memory.
    pub fn boot(&mut self, mib: u32) -> Result<(), Box<dyn Error>> {
        let (machine, _) = self.guest.insert(self.make(mib)?);
        machine.boot()
    }

    /// Waits for a guest. Its source's configuration decides what the machine is.
    pub fn listen(&mut self, at: &str) -> Result<(), Box<dyn Error>> {
        let (orders, wake) = (self.orders.0.clone(), self.wake.try_clone()?);
        // The engine's thread `configure` waits, while the event loop makes the machine and its vCPU's thread.
        let make = move |configuration: &[u8]| -> Made {
            let (answer, made) = channel();
            let order = Order { configuration: configuration.to_vec(), answer };
            let gone = || VmError::new("make the machine", "the VMM ends");
            orders.send(order).map_err(|_| gone())?;
            wake.write(1).map_err(|error| VmError::new("wake the event loop", error))?;
            made.recv().map_err(|_| gone())?
        };
        // The filters permit no postcopy.
        let limits = SettingLimits { postcopy: false, ..SettingLimits::default() };
        let (at, shared) = (at.parse::<Address>()?, SharedSettings::AsSource(limits));
        let (parameters, on) = (self.parameters.clone(), Capabilities::default());
        self.incoming = Some(Incoming::listen_with(&at, parameters, on, shared, tell("incoming"), make)?);
        Ok(())
    }

    /// Serves commands, orders of the engine and the device's timer, until standard input ends.
    pub fn run(mut self) -> Result<(), Box<dyn Error>> {
        let epoll = Epoll::new()?;
        let input = std::io::stdin();
        for fd in [input.as_raw_fd(), self.wake.as_raw_fd()] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, fd as u64))?;
        }
        let mut events = [EpollEvent::default(); 2];
        loop {
            let count = match epoll.wait(TICK_MS, &mut events) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                count => count?,
            };
            self.take_claimed();
            for event in &events[..count] {
                if event.data() as RawFd == self.wake.as_raw_fd() {
                    self.wake.read()?;
                    self.fill_orders();
                    continue;
                }
                let mut line = String::new();
                // The test sends one line at a time, so that no second one waits in the buffer.
                if input.read_line(&mut line)? == 0 || line.trim() == "quit" {
                    return Ok(());
                }
                match self.command(line.trim()) {
                    Ok(text) => println!("ok {text}"),
                    Err(error) => println!("error: {error}"),
                }
            }
            if let Some((machine, _)) = &self.guest {
                machine.ticker().tick(&machine.memory())?;
            }
        }
    }

    fn fill_orders(&mut self) {
        while let Ok(Order { configuration, answer }) = self.orders.1.try_recv() {
            let made = Migratable::size_of(&configuration).and_then(|mib| {
                self.make(mib).map_err(|error| VmError::new("make the machine", error.to_string()))
            });
            let made = made.map(|made| self.made.insert(made).1.clone() as Arc<dyn TargetVm>);
            // The engine has given up if nothing waits for the answer.
            let _ = answer.send(made);
        }
    }

    /// Gives the machine that was made to the commands, as soon as the engine has claimed it.
    fn take_claimed(&mut self) {
        if self.incoming.as_ref().is_some_and(|incoming| incoming.settings().is_some()) {
            self.guest = self.made.take().or(self.guest.take());
        }
    }

    fn make(&self, mib: u32) -> Result<Guest, Box<dyn Error>> {
        let machine = Arc::new(Machine::on(&self.kvm, (mib as usize) << 20)?);
        let vm = Arc::new(Migratable::new(machine.clone(), mib)?);
        Ok((machine, vm))
    }

    fn command(&mut self, line: &str) -> Done {
        let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
        match command {
            "migrate" => {
                let (_, vm) = self.guest.as_ref().ok_or("there is no guest")?;
                let (to, parameters) = (argument.parse::<Address>()?, self.parameters.clone());
                let on = Capabilities { multifd: true, ..Capabilities::default() };
                self.outgoing = Some(Migration::start(vm.clone(), &to, parameters, on, tell("outgoing"))?);
                Ok(String::new())
            }
            "cancel" => {
                self.outgoing.as_ref().ok_or("nothing was migrated")?.cancel()?;
                Ok(String::new())
            }
            "limit" => {
                self.parameters.max_bandwidth_bytes = argument.parse()?;
                Ok(String::new())
            }
            "status" => Ok(self.status()),
            _ => Err("commands are migrate, cancel, limit, status and quit".into()),
        }
    }

    fn status(&self) -> String {
        let outgoing = self.outgoing.as_ref().map(Migration::status).unwrap_or_default();
        let incoming = self.incoming.as_ref().map(Incoming::status).unwrap_or_default();
        let machine = self.guest.as_ref().map(|(machine, _)| machine);
        let runs = machine.is_some_and(|machine| machine.vcpu().is_running());
        let bytes =
            machine.map_or(0, |machine| machine.memory().iter().map(|region| region.len()).sum::<u64>());
        let mib = bytes >> 20;
        format!("outgoing {outgoing} incoming {incoming} memory {mib} running {runs}")
    }
}

/// Prints the engine's events. The engine's threads call it, so it must return soon.
fn tell(which: &'static str) -> Arc<dyn Observer> {
    Arc::new(move |event: &Event| println!("{which}: {event:?}"))
}

#[cfg(test)]
#[path = "../tests/unit/claimed.rs"]
mod tests;
