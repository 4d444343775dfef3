//! The guest's connection to the lab: it sends numbers, and the lab returns each of them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::time::Duration;

use crate::linux::network::up;

pub(in crate::linux) const LAB_ADDRESS: [u8; 4] = [10, 15, 0, 1];
pub(in crate::linux) const GUEST_ADDRESS: [u8; 4] = [10, 15, 0, 2];
pub(in crate::linux) const PORT: u16 = 5015;
/// Length of a number, in bytes.
pub(in crate::linux) const WORD: usize = 8;
const INTERFACE: &str = "eth0";
/// Time limit of an answer. It is longer than a pause, and shorter than a test's limit.
const PATIENCE: Duration = Duration::from_secs(60);

/// Numbers that a working guest sends in a step.
pub(super) const AT_ONCE: u64 = 50;
/// Numbers of a brief guest ([`super::BRIEF`]).
pub(super) const FEW: u64 = 10;

/// Sets the card up. Ends the guest if there is none.
pub(super) fn set_up() {
    up(INTERFACE, Some(GUEST_ADDRESS)).unwrap_or_else(|error| panic!("{INTERFACE}: {error}"));
}

/// A connection that stays open as long as the guest works.
pub(super) struct Connection {
    lab: TcpStream,
    sent: u64,
    wrong: usize,
}

impl Connection {
    /// Connects to the lab. Ends the guest if there is no network.
    pub(super) fn open() -> Self {
        set_up();
        let lab = TcpStream::connect((Ipv4Addr::from(LAB_ADDRESS), PORT))
            .and_then(|lab| {
                lab.set_nodelay(true)?;
                lab.set_read_timeout(Some(PATIENCE))?;
                Ok(lab)
            })
            .unwrap_or_else(|error| panic!("no connection: {error}"));
        Self { lab, sent: 0, wrong: 0 }
    }

    /// Sends some numbers and reads the answers.
    pub(super) fn step(&mut self, count: u64) {
        let numbers = self.sent + 1..=self.sent + count;
        let words: Vec<u8> = numbers.clone().flat_map(u64::to_le_bytes).collect();
        self.sent += count;
        let mut heard = vec![0; words.len()];
        let done = self.lab.write_all(&words).and_then(|()| self.lab.read_exact(&mut heard));
        self.wrong += usize::from(done.is_err() || heard != words);
    }

    /// Returns the numbers that were sent, and the steps that failed.
    pub(super) fn finish(mut self) -> (u64, usize) {
        // The peer closes its end after the guest's. Without this wait, the card could be reset before it has
        // sent the guest's FIN.
        let is_over = self.lab.shutdown(Shutdown::Write).and_then(|()| self.lab.read(&mut [0]));
        self.wrong += usize::from(!matches!(is_over, Ok(0)));
        (self.sent, self.wrong)
    }
}
