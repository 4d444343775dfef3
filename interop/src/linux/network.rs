//! The network between guest and lab: a bridge, the taps of the machines on it, and a peer that counts a
//! guest's numbers.

use std::ffi::{c_char, c_int, c_ulong};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::guest::network::{GUEST_ADDRESS, LAB_ADDRESS, PORT, WORD};
use crate::scenarios::{Failure, ensure};

pub(super) const BRIDGE: &str = "br0";
const BRIDGE_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
/// Requests from `linux/sockios.h`: make a bridge, add an interface to a bridge.
const SIOCBRADDBR: c_ulong = 0x89a0;
const SIOCBRADDIF: c_ulong = 0x89a2;
/// MAC address of a guest's card, where it must be known.
pub(super) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 0x0a, 0x0f, 0x02];
/// Time limit of the guest's silence before the peer gives up.
const PATIENCE: Duration = Duration::from_secs(600);

/// The peer's observations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    /// Count of numbers; each one must be the previous one plus 1.
    pub(super) numbers: u64,
    pub(super) longest_gap: Duration,
}

/// A peer on the bridge; it accepts one connection.
pub(super) struct Peer {
    thread: JoinHandle<Result<Seen, Failure>>,
    now: Arc<Mutex<Seen>>,
}

impl Peer {
    /// Makes the bridge if necessary, and waits for the guest.
    pub(super) fn start() -> Result<Self, Failure> {
        make_bridge()?;
        let listener = TcpListener::bind((std::net::Ipv4Addr::from(LAB_ADDRESS), PORT)).map_err(said)?;
        let now = Arc::new(Mutex::new(Seen { numbers: 0, longest_gap: Duration::ZERO }));
        let theirs = Arc::clone(&now);
        let serve = move || {
            let (guest, _) = listener.accept().map_err(said)?;
            // The listener is closed, so that the next peer can use the port.
            drop(listener);
            serve(guest, &theirs)
        };
        Ok(Self { thread: std::thread::spawn(serve), now })
    }

    /// Returns the observations after the guest has closed the connection.
    pub(super) fn seen(self) -> Result<Seen, Failure> {
        self.thread.join().map_err(|_| "the peer panicked".to_owned())?
    }

    /// Waits until `more` further numbers have arrived.
    pub(super) fn wait_for_numbers(&self, more: u64) -> Result<(), Failure> {
        let (wanted, begin) = (self.now.lock().numbers + more, Instant::now());
        while self.now.lock().numbers < wanted {
            ensure(begin.elapsed() < PATIENCE && !self.thread.is_finished(), || {
                format!("the guest is silent: {:?}", self.now.lock())
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns the longest gap since the last call.
    pub(super) fn take_longest_gap(&self) -> Duration {
        std::mem::take(&mut self.now.lock().longest_gap)
    }
}

/// Reads numbers, and returns each of them.
fn serve(mut guest: TcpStream, now: &Mutex<Seen>) -> Result<Seen, Failure> {
    guest.set_read_timeout(Some(PATIENCE)).map_err(said)?;
    guest.set_nodelay(true).map_err(said)?;
    let mut last = Instant::now();
    let mut word = [0; WORD];
    loop {
        let read = guest.read_exact(&mut word);
        let mut seen = now.lock();
        match read {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(*seen),
            Err(error) => return Err(format!("after {} numbers of the guest: {error}", seen.numbers)),
        }
        let number = u64::from_le_bytes(word);
        if number != seen.numbers + 1 {
            return Err(format!("the guest sent {number} after {}", seen.numbers));
        }
        seen.numbers = number;
        seen.longest_gap = seen.longest_gap.max(last.elapsed());
        drop(seen);
        last = Instant::now();
        guest.write_all(&word).map_err(said)?;
    }
}

/// Makes the bridge, unless it exists.
pub(super) fn make_bridge() -> Result<(), Failure> {
    if std::path::Path::new("/sys/class/net").join(BRIDGE).exists() {
        return Ok(());
    }
    let mut name = name_of(BRIDGE);
    ioctl(SIOCBRADDBR, name.as_mut_ptr().cast())?;
    // Sets a fixed MAC address. Otherwise the bridge uses a tap's address and changes it when that tap is
    // removed. The guest would continue to send to the old address.
    let mut request = request_of(BRIDGE);
    request.ifr_ifru.ifru_hwaddr = address(libc::ARPHRD_ETHER, 0, &BRIDGE_MAC);
    ioctl(libc::SIOCSIFHWADDR, (&raw mut request).cast())?;
    up(BRIDGE, Some(LAB_ADDRESS))
}

/// [`GUEST_MAC`] in the format of command lines.
pub(super) fn guest_mac() -> String {
    GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":")
}

/// A tap name that no other machine has.
pub(super) fn new_tap() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("tap{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A `ping` that continuously tests the guest.
pub(super) struct Pings(Child);

impl Pings {
    /// Interval in seconds: the minimum that is not a flood.
    const INTERVAL: f64 = 0.2;

    /// Starts `ping`.
    pub(super) fn start() -> Result<Self, Failure> {
        let address = std::net::Ipv4Addr::from(GUEST_ADDRESS).to_string();
        let mut ping = Command::new("ping");
        ping.args(["-n", "-q", "-i", &Self::INTERVAL.to_string(), &address]).stdout(Stdio::piped());
        ping.spawn().map(Self).map_err(|error| format!("ping: {error}"))
    }

    /// Stops `ping` and returns its counts.
    pub(super) fn finish(mut self) -> Result<Pinged, Failure> {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).map_err(said)?;
        let mut text = String::new();
        self.0.stdout.take().ok_or("ping has no output")?.read_to_string(&mut text).map_err(said)?;
        self.0.wait().map_err(said)?;
        let number =
            |what: &str| text.split(',').find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok());
        let sent = text.lines().find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok());
        match (sent, number("received")) {
            (Some(sent), Some(received)) => Ok(Pinged { sent, received }),
            _ => Err(format!("ping said: {text}")),
        }
    }
}

/// Counts of [`Pings`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinged {
    sent: u32,
    received: u32,
}

impl Pinged {
    /// Time for which the guest was unreachable.
    pub(super) fn lost(self) -> Duration {
        Duration::from_secs_f64(Pings::INTERVAL) * self.sent.saturating_sub(self.received)
    }
}

impl std::fmt::Display for Pinged {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{} of {} pings were answered", self.received, self.sent)
    }
}

/// Adds a machine's tap to the bridge.
pub(super) fn join(tap: &str) -> Result<(), Failure> {
    let mut request = request_of(tap);
    ioctl(libc::SIOCGIFINDEX, (&raw mut request).cast())?;
    // SAFETY: the kernel has written this member of the union.
    let index = unsafe { request.ifr_ifru.ifru_ifindex };
    let mut request = request_of(BRIDGE);
    request.ifr_ifru.ifru_ifindex = index;
    ioctl(SIOCBRADDIF, (&raw mut request).cast())?;
    up(tap, None)
}

/// Gives an interface an address in a /24 network, and sets it up.
pub(super) fn up(name: &str, address: Option<[u8; 4]>) -> Result<(), Failure> {
    if let Some(address) = address {
        for (call, bytes) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, [255, 255, 255, 0])] {
            let mut request = request_of(name);
            request.ifr_ifru.ifru_addr = self::address(libc::AF_INET as libc::sa_family_t, 2, &bytes);
            ioctl(call, (&raw mut request).cast())?;
        }
    }
    let mut request = request_of(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    ioctl(libc::SIOCSIFFLAGS, (&raw mut request).cast())
}

/// A socket address of that family, whose `bytes` start at offset `at`.
fn address(family: libc::sa_family_t, at: usize, bytes: &[u8]) -> libc::sockaddr {
    let mut data = [0; 14];
    data[at..].iter_mut().zip(bytes).for_each(|(to, from)| *to = *from as c_char);
    libc::sockaddr { sa_family: family, sa_data: data }
}

fn name_of(name: &str) -> [c_char; libc::IFNAMSIZ] {
    let mut bytes = [0; libc::IFNAMSIZ];
    bytes.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)).for_each(|(to, from)| *to = from as c_char);
    bytes
}

fn request_of(name: &str) -> libc::ifreq {
    // SAFETY: integers and a union of them: zeros are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name = name_of(name);
    request
}

fn ioctl(call: c_ulong, argument: *mut libc::c_void) -> Result<(), Failure> {
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(said)?;
    // SAFETY: the descriptor is open, and every caller gives what this call of the kernel reads and writes.
    let result: c_int = unsafe { libc::ioctl(socket.as_raw_fd(), call, argument) };
    match result {
        0.. => Ok(()),
        _ => Err(format!("interface, call {call:#x}: {}", std::io::Error::last_os_error())),
    }
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
