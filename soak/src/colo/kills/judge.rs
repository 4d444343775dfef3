//! What must be true of a guest whose primary was killed or frozen.

use sterna_guests::ProcessGuest;

use super::account::Account;
use super::packets::Packet;
use crate::colo::play::{Again, until};
use crate::colo::voice::{Voice, numbers};
use crate::judge::whole;

/// The most that a process may have been about to write when it was frozen: a piece of the gate's.
const LEAVING: usize = 4096;

/// What the observer and the judge saw of a primary.
pub(super) struct Seen {
    /// The standby says that the guest goes on from this one.
    pub(super) checkpoint: u64,
    /// What the primary told of each that it took: number, steps, sum of its memory.
    pub(super) accounts: Vec<String>,
    /// All that came out of its process.
    pub(super) heard: Vec<u8>,
    /// Packets that came out of it, in the order in which they came.
    pub(super) packets: Vec<Packet>,
    /// How many bytes and packets came before it woke, and how the protection ended there.
    pub(super) woken: Option<((usize, usize), String)>,
}

/// Of what is as it must be.
pub(super) struct Verdict {
    /// From which the guest went on.
    pub(super) checkpoint: u64,
    /// How many were heard.
    pub(super) packets: usize,
    /// What a primary that woke still said.
    pub(super) late_bytes: Option<usize>,
}

impl Seen {
    pub(super) fn judge(
        &self,
        (guest, says): (&ProcessGuest, Voice),
        account: &Account,
        again: &[(Again, String)],
    ) -> Result<Verdict, String> {
        let [(again, found)] = again else { return Err(format!("said again {} times", again.len())) };
        self.is_a_checkpoint(account, found)?;
        let late_bytes = self.woken.as_ref().map(|(before, how)| self.woke(*before, how)).transpose()?;
        self.packets(again)?;
        self.observer(again, says)?;
        whole(guest)?;
        Ok(Verdict { checkpoint: self.checkpoint, packets: self.packets.len(), late_bytes })
    }

    /// The survivor is what the primary was in the pause of that checkpoint.
    fn is_a_checkpoint(&self, account: &Account, found: &str) -> Result<(), String> {
        let loaded = account.loaded().ok_or("no account came with the guest")?;
        if loaded.split_once(' ').is_none_or(|(_, of)| of != found) {
            return Err(format!("the survivor is {found:?}, and its checkpoint was {loaded:?}"));
        }
        // What the seeding saved is number 0.
        if !loaded.starts_with(&format!("{} ", self.checkpoint)) {
            return Err(format!(
                "the guest goes on from {loaded:?} and not from checkpoint {}",
                self.checkpoint
            ));
        }
        if !self.accounts.contains(&loaded) {
            return Err(format!("the primary has taken no checkpoint {loaded:?}"));
        }
        Ok(())
    }

    /// Each came once and in order, and none is ahead of the survivor.
    fn packets(&self, again: &Again) -> Result<(), String> {
        if let Some(pair) = self.packets.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
            return Err(format!("packet {} was heard after packet {}", pair[1].0, pair[0].0));
        }
        match self.packets.iter().find(|(_, steps)| *steps > again.steps) {
            Some((number, steps)) => Err(format!(
                "packet {number} was heard ahead of its survivor: it is of step {steps}, and the survivor was at {}",
                again.steps
            )),
            None => Ok(()),
        }
    }

    /// What was heard is never ahead of the survivor and lacks nothing.
    fn observer(&self, again: &Again, mut says: Voice) -> Result<(), String> {
        let Again { position, bytes, steps } = again;
        let at = *position as usize;
        let Some(tail) = self.heard.get(at..) else {
            let heard = self.heard.len();
            return Err(format!(
                "the survivor goes on from byte {at}, and the primary was heard up to {heard}"
            ));
        };
        if !bytes.starts_with(tail) {
            return Err(format!(
                "the primary was heard ahead of its survivor: {} bytes after byte {at}, of which it knows {}",
                tail.len(),
                bytes.len()
            ));
        }
        let known = [&self.heard[..at], bytes].concat();
        if let Some(ahead) = numbers(&known)?.into_iter().find(|said| said > steps) {
            return Err(format!("step {ahead} was heard of, and the survivor was at {steps}"));
        }
        until(|| says.heard().len() > bytes.len())?;
        says.end();
        let whole = [&self.heard[..at], &says.heard()].concat();
        if !whole.starts_with(&known) {
            return Err("the survivor was heard out of order".into());
        }
        numbers(&whole).map(drop)
    }

    /// It lets nothing out and stops its guest.
    fn woke(&self, (bytes, packets): (usize, usize), how: &str) -> Result<usize, String> {
        if !matches!(how, "Lost false false" | "HandedOver false false") {
            return Err(format!(
                "the primary woke, and its guest runs at the standby: {how} (outcome, runs, may run)"
            ));
        }
        let (late, late_packets) = (self.heard.len() - bytes, self.packets.len() - packets);
        // A packet that was leaving.
        if late > LEAVING || late_packets > 1 {
            return Err(format!("the primary woke, said {late} bytes and sent {late_packets} packets"));
        }
        Ok(late)
    }
}
