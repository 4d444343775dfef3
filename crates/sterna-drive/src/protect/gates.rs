//! Adds a gate to each of a QEMU's network cards while the guest runs, and removes it again. No packet is lost or
//! overtaken.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_transport::Channel;

use super::gate::{GateStatistics, OutputGate};
use super::monitor::Monitor;
use super::names::{HOLD, Names, PREFIX, WAIT};
use super::nics::Nic;
use crate::error::DriveError;
use crate::vm::{ANSWER_LIMIT, Vm};

/// How long packets may take to leave when the gates are removed.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// How long packets wait at most while a gate is removed. Longer than [`DRAIN_LIMIT`] and the commands.
const WAIT_INTERVAL: Duration = Duration::from_secs(20);

/// All gates of a machine, one for each network card.
pub(super) struct Gates {
    gates: Vec<OutputGate>,
    /// The sockets to which released packets are written. Their unsent bytes show whether QEMU has read them.
    ways_out: Vec<Channel>,
    /// The netdevs of the cards.
    netdevs: Vec<String>,
}

impl Gates {
    /// Adds an open gate to each of `nics`. Sockets are created in `directory`. At most `most_bytes` wait at each
    /// gate.
    ///
    /// # Errors
    /// QEMU or the host refuses. The gates that were added are removed again.
    pub(super) fn install(
        monitor: &Monitor,
        nics: &[Nic],
        directory: &Path,
        most_bytes: u64,
        may_say: &Arc<dyn Fn(u64) -> bool + Send + Sync>,
    ) -> Result<Self, DriveError> {
        let mut gates = Self { gates: Vec::new(), ways_out: Vec::new(), netdevs: Vec::new() };
        for (index, nic) in nics.iter().enumerate() {
            let may_say = Arc::clone(may_say);
            if let Err(error) = gates.add(monitor, index, nic, directory, most_bytes, may_say) {
                for index in 0..=index {
                    // The operator must get the refusal, not an error of the removal.
                    let _ = remove_one(monitor, &Names::new(index), None, || ());
                }
                return Err(error);
            }
        }
        Ok(gates)
    }

    fn add(
        &mut self,
        monitor: &Monitor,
        index: usize,
        nic: &Nic,
        directory: &Path,
        most_bytes: u64,
        may_say: Arc<dyn Fn(u64) -> bool + Send + Sync>,
    ) -> Result<(), DriveError> {
        let names = Names::new(index);
        let from_guest = connected(monitor, directory, &names.from_guest)?;
        let to_network = connected(monitor, directory, &names.to_network)?;
        let refused = |error| DriveError::file("set up", "a gate's socket", error);
        let way_out = to_network.try_clone().map_err(refused)?;
        let way_out = Channel::from_fd(way_out.into())?;
        let gate = OutputGate::new(from_guest, to_network, most_bytes, move |epoch| may_say(epoch));
        self.gates.push(gate.map_err(refused)?);
        self.ways_out.push(way_out);
        self.netdevs.push(nic.netdev.clone());
        // First the filter that returns packets: after the second command QEMU sends packets to the gate.
        for (name, end, chardev) in
            [(&names.give, "indev", &names.to_network), (&names.hold, "outdev", &names.from_guest)]
        {
            let object = json!({"qom-type": "filter-redirector", "id": name, "netdev": nic.netdev, "queue": "rx", end: chardev});
            monitor.execute("object-add", object, ANSWER_LIMIT).map_err(|error| {
                DriveError::Unfit(format!(
                    "the output of the network card {} cannot be held back: {error}",
                    nic.name
                ))
            })?;
        }
        Ok(())
    }

    /// Holds packets from now on. Call it while the guest is paused.
    pub(super) fn close(&self) {
        self.gates.iter().for_each(OutputGate::close);
    }

    /// Ends an epoch at every gate. Call it while the guest is paused.
    pub(super) fn end_epoch(&self) {
        for gate in &self.gates {
            gate.end_epoch();
        }
    }

    /// Allows packets of this epoch and earlier ones to leave.
    pub(super) fn release(&self, epoch: u64) {
        self.gates.iter().for_each(|gate| gate.release(epoch));
    }

    /// Allows every packet to leave, now and later.
    pub(super) fn open(&self) {
        self.gates.iter().for_each(OutputGate::open);
    }

    /// Drops all waiting packets.
    pub(super) fn drop_waiting(&self) {
        self.gates.iter().for_each(OutputGate::drop_waiting);
    }

    /// The sum of the gates' statistics. Delays are the maximum over all gates.
    pub(super) fn statistics(&self) -> GateStatistics {
        let mut sum = GateStatistics::default();
        for gate in self.gates.iter().map(OutputGate::statistics) {
            sum.waiting += gate.waiting;
            sum.waiting_bytes += gate.waiting_bytes;
            sum.released += gate.released;
            sum.dropped += gate.dropped;
            sum.last_delay = sum.last_delay.max(gate.last_delay);
            sum.delay_p50 = sum.delay_p50.max(gate.delay_p50);
            sum.delay_p99 = sum.delay_p99.max(gate.delay_p99);
        }
        sum
    }

    /// Number of gates.
    pub(super) fn len(&self) -> usize {
        self.gates.len()
    }

    /// Whether QEMU has read every packet of this epoch and earlier ones.
    pub(super) fn has_delivered(&self, epoch: u64) -> bool {
        self.gates.iter().all(|gate| gate.has_released(epoch))
            && self.ways_out.iter().all(|way_out| way_out.unsent_bytes() == 0)
    }

    /// The error that ended one of the gates, if any. Its card has no network then.
    pub(super) fn ended(&self) -> Option<String> {
        self.gates.iter().find_map(OutputGate::ended)
    }

    /// Removes the gates. They must be open, and the guest must run: QEMU delivers no packets of a paused guest.
    ///
    /// # Errors
    /// QEMU refused, or packets were lost. The text distinguishes the two.
    pub(super) fn remove(self, monitor: &Monitor) -> Result<(), DriveError> {
        let mut failed = Ok(());
        for (index, (gate, way_out)) in self.gates.iter().zip(&self.ways_out).enumerate() {
            let mut is_drained = true;
            let netdev = self.netdevs.get(index).map(String::as_str);
            let removed =
                remove_one(monitor, &Names::new(index), netdev, || is_drained = drain(gate, way_out));
            let removed = removed.and_then(|()| match is_drained {
                true => Ok(()),
                false => Err(DriveError::Failed(format!(
                    "QEMU did not accept {} packets within {} s: they are lost",
                    gate.statistics().waiting,
                    DRAIN_LIMIT.as_secs()
                ))),
            });
            failed = failed.and(removed);
        }
        failed
    }
}

/// Waits until QEMU has read every packet of the gate. False after the time limit.
fn drain(gate: &OutputGate, way_out: &Channel) -> bool {
    let until = Instant::now() + DRAIN_LIMIT;
    gate.wait_until_empty(DRAIN_LIMIT) && {
        while way_out.unsent_bytes() > 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// Removes one gate. New packets wait in QEMU until those of the gate have left, because they would overtake them.
/// `netdev`: that of the card; none if no packet can be in the gate.
fn remove_one(
    monitor: &Monitor,
    names: &Names,
    netdev: Option<&str>,
    drain: impl FnOnce(),
) -> Result<(), DriveError> {
    let act =
        |command: &str, name: &str| monitor.execute(command, json!({ "id": name }), ANSWER_LIMIT).map(drop);
    // A packet passes the newest filter first.
    let waits = netdev.is_some_and(|netdev| {
        let interval = WAIT_INTERVAL.as_micros() as u64;
        let object = json!({"qom-type": "filter-buffer", "id": names.wait, "netdev": netdev, "queue": "rx", "interval": interval});
        // Without it, no packet is lost, but new ones may overtake the waiting ones.
        monitor.execute("object-add", object, ANSWER_LIMIT).is_ok()
    });
    let held = act("object-del", &names.hold);
    drain();
    let given = act("object-del", &names.give);
    let from_guest = act("chardev-remove", &names.from_guest);
    let to_network = act("chardev-remove", &names.to_network);
    let waited = if waits { act("object-del", &names.wait) } else { Ok(()) };
    held.and(given).and(from_guest).and(to_network).and(waited)
}

/// Removes the objects and character devices that a killed `sterna protect` left. Returns the number of objects.
///
/// # Errors
/// The monitor's error.
pub(super) fn remove_left_ones(vm: &mut Vm) -> Result<usize, DriveError> {
    let objects = vm.execute("qom-list", json!({"path": "/objects"}))?;
    let devices = vm.execute("query-chardev", Value::Null)?;
    let names = |list: &Value, member: &str| -> Vec<String> {
        let names = list.as_array().into_iter().flatten().filter_map(|entry| entry[member].as_str());
        names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect()
    };
    let (objects, devices) = (names(&objects, "name"), names(&devices, "label"));
    // First the filters that send packets to a gate. Later packets then bypass the gate.
    let (mut hold, others): (Vec<_>, Vec<_>) = objects.into_iter().partition(|name| name.ends_with(HOLD));
    let (wait, give): (Vec<_>, Vec<_>) = others.into_iter().partition(|name| name.ends_with(WAIT));
    hold.extend(give.into_iter().chain(wait));
    // Every object is tried: one that stays only blocks its own card.
    let objects = hold.iter().map(|name| vm.execute("object-del", json!({ "id": name })).map(drop));
    let removed = objects.fold(Ok(()), Result::and);
    let devices = devices.iter().map(|name| vm.execute("chardev-remove", json!({ "id": name })).map(drop));
    devices.fold(removed, Result::and).map(|()| hold.len())
}

/// Creates a character device in QEMU and returns the socket to which it is connected.
fn connected(monitor: &Monitor, directory: &Path, name: &str) -> Result<UnixStream, DriveError> {
    let path = directory.join(name);
    let refused = |error| DriveError::file("listen at", &path, error);
    let listener = UnixListener::bind(&path).map_err(refused)?;
    let address = json!({"type": "unix", "data": {"path": path.display().to_string()}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
    // QEMU has connected to the socket before it answers.
    monitor.execute("chardev-add", json!({"id": name, "backend": backend}), ANSWER_LIMIT)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let (socket, _) = listener.accept().map_err(refused)?;
    socket.set_nonblocking(false).map_err(refused)?;
    // No other process may connect.
    let _ = std::fs::remove_file(&path);
    Ok(socket)
}
