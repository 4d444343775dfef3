//! Two soft-RoCE devices with a wire between them. Packets on the wire can be lost and delayed. Over a single
//! device, packets are looped back and pass no queueing discipline.
//!
//! Both ends of the wire are in one network namespace, because soft-RoCE of Linux 6.12 supports no other.
//! Packets to an address of this machine must still leave it. Rules for outgoing packets therefore precede
//! the table of local addresses, which then applies only to incoming packets.

use std::process::Command;
use std::sync::OnceLock;

use crate::kernel::output;
use crate::scenarios::Failure;

/// Addresses of the two ends.
pub(super) const ADDRESSES: [&str; 2] = ["10.9.0.1", "10.9.0.2"];
const ENDS: [&str; 2] = ["v0", "v1"];
/// The bridge ports to which the ends are connected.
const PORTS: [&str; 2] = ["p0", "p1"];
const HARDWARE: [&str; 2] = ["02:00:00:00:00:01", "02:00:00:00:00:02"];
const DEVICES: [&str; 2] = ["rxe1", "rxe2"];

/// The wire, for one user at a time.
pub(super) struct Wire(());

impl Wire {
    /// A wire that treats packets according to `discipline`. It is in `tc`'s syntax
    /// (`netem loss 1% delay 5ms`).
    pub(super) fn with(discipline: &str) -> Result<Self, Failure> {
        static MADE: OnceLock<Result<(), Failure>> = OnceLock::new();
        MADE.get_or_init(make).clone()?;
        discipline_of_both(discipline)?;
        Ok(Self(()))
    }

    /// Drops every packet from now on.
    pub(super) fn cut(&self) -> Result<(), Failure> {
        discipline_of_both("netem loss 100%")
    }

    /// Creates the devices again. After a connection broke while a device had no link, soft-RoCE of Linux
    /// 6.12 accepts no further connection on it. No process may have a device open, because the kernel waits
    /// for that.
    pub(super) fn renew(&self) -> Result<(), Failure> {
        DEVICES.iter().try_for_each(|device| run(&format!("rdma link del {device}")))?;
        devices()
    }

    /// Restores the link of both ends, without packet loss.
    pub(super) fn restore(&self) -> Result<(), Failure> {
        discipline_of_both("pfifo")?;
        (0..ENDS.len()).try_for_each(|end| self.set_link(end, true))
    }

    /// Sets the link of an end up or down.
    pub(super) fn set_link(&self, end: usize, is_up: bool) -> Result<(), Failure> {
        run(&format!("ip link set {} {}", PORTS[end], if is_up { "up" } else { "down" }))
    }
}

/// The command by which another process drops every packet of the first end, and thereby of every connection.
pub(super) fn cut_command() -> String {
    format!("tc qdisc replace dev {} root netem loss 100%", ENDS[0])
}

impl Drop for Wire {
    /// The devices remain. This process has them open as long as it lives, and the kernel removes a device
    /// only after it is closed.
    fn drop(&mut self) {
        // The next user sets the discipline that it needs.
        let _ = discipline_of_both("pfifo");
    }
}

fn make() -> Result<(), Failure> {
    run("ip link add b0 type bridge")?;
    for (end, port) in ENDS.iter().zip(PORTS) {
        run(&format!("ip link add {end} type veth peer name {port}"))?;
        run(&format!("ip link set {port} mtu 9000 master b0 up"))?;
    }
    run("ip link set b0 mtu 9000 up")?;
    run("ip rule add pref 1000 lookup local")?;
    // The default rule for local addresses precedes all others, so it is removed.
    run("ip rule del pref 0")?;
    for here in [0, 1] {
        let there = 1 - here;
        let (end, table) = (ENDS[here], 200 + here);
        run(&format!("ip link set {end} address {} mtu 9000 up", HARDWARE[here]))?;
        run(&format!("ip addr add {}/24 dev {end}", ADDRESSES[here]))?;
        set(end, "accept_local", "1")?;
        set(end, "rp_filter", "0")?;
        run(&format!("ip neigh replace {} lladdr {} dev {end}", ADDRESSES[there], HARDWARE[there]))?;
        run(&format!("ip rule add pref {table} iif lo to {} lookup {table}", ADDRESSES[there]))?;
        run(&format!("ip route add {} dev {end} src {} table {table}", ADDRESSES[there], ADDRESSES[here]))?;
    }
    devices()
}

fn devices() -> Result<(), Failure> {
    let mut both = DEVICES.iter().zip(ENDS);
    both.try_for_each(|(device, end)| run(&format!("rdma link add {device} type rxe netdev {end}")))
}

fn discipline_of_both(discipline: &str) -> Result<(), Failure> {
    ENDS.iter().try_for_each(|end| run(&format!("tc qdisc replace dev {end} root {discipline}")))
}

fn set(end: &str, name: &str, value: &str) -> Result<(), Failure> {
    let path = format!("/proc/sys/net/ipv4/conf/{end}/{name}");
    std::fs::write(&path, value).map_err(|error| format!("{path}: {error}"))
}

fn run(line: &str) -> Result<(), Failure> {
    let mut words = line.split(' ');
    output(Command::new(words.next().unwrap_or_default()).args(words)).map(drop)
}
