//! Properties that must hold for a guest whose primary was killed or frozen.

use sterna_guests::ProcessGuest;

use super::account::Account;
use super::packets::Packet;
use crate::colo::play::{Again, until};
use crate::colo::voice::{Voice, numbers};
use crate::judge::whole;

/// Limit of the bytes that a process may have been writing when it was frozen: one piece of the gate.
const LEAVING: usize = 4096;

/// The observations of a primary, by the observer and by the judge.
pub(super) struct Seen {
    /// Number of the checkpoint from which the standby resumed the guest.
    pub(super) checkpoint: u64,
    /// The primary's account of each checkpoint that it took: number, steps, sum of its memory.
    pub(super) accounts: Vec<String>,
    /// All output of the primary's process.
    pub(super) heard: Vec<u8>,
    /// Packets of the primary's process, in the order of their arrival.
    pub(super) packets: Vec<Packet>,
    /// Numbers of bytes and packets before the primary woke, and how its protection ended.
    pub(super) woken: Option<((usize, usize), String)>,
}

/// Result of a case without violations.
pub(super) struct Verdict {
    /// Number of the checkpoint from which the guest resumed.
    pub(super) checkpoint: u64,
    /// Number of packets that were heard.
    pub(super) packets: usize,
    /// Bytes that a primary still wrote after it woke.
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

    /// The survivor's state equals the primary's state in the pause of that checkpoint.
    fn is_a_checkpoint(&self, account: &Account, found: &str) -> Result<(), String> {
        let loaded = account.loaded().ok_or("no account came with the guest")?;
        if loaded.split_once(' ').is_none_or(|(_, of)| of != found) {
            return Err(format!("the survivor is {found:?}, and its checkpoint was {loaded:?}"));
        }
        // The state that the seeding saved is number 0.
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

    /// Each packet arrived once and in order, and none is ahead of the survivor.
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

    /// Heard output is never ahead of the survivor, and is complete.
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

    /// A primary that wakes releases no output and stops its guest.
    fn woke(&self, (bytes, packets): (usize, usize), how: &str) -> Result<usize, String> {
        if !matches!(how, "Lost false false" | "HandedOver false false") {
            return Err(format!(
                "the primary woke, and its guest runs at the standby: {how} (outcome, runs, may run)"
            ));
        }
        let (late, late_packets) = (self.heard.len() - bytes, self.packets.len() - packets);
        // One packet may have been in transit when the primary was frozen.
        if late > LEAVING || late_packets > 1 {
            return Err(format!("the primary woke, said {late} bytes and sent {late_packets} packets"));
        }
        Ok(late)
    }
}
