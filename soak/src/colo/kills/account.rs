//! A device whose state identifies its guest's: number of the checkpoint, steps, and a sum of all memory.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use sterna::ram::GuestRam;
use sterna::{Device, Vm as _, VmError};
use sterna_guests::ProcessGuest;

/// First word of a line that reports an account.
pub(super) const WORD: &str = "account";

/// Called with each account that is saved.
type Tell = Box<dyn Fn(&str) + Send + Sync>;

pub(super) struct Account {
    guest: Weak<ProcessGuest>,
    saved: Mutex<u64>,
    loaded: Mutex<Option<String>>,
    tell: Tell,
}

impl Account {
    pub(super) fn of(guest: &Arc<ProcessGuest>, tell: impl Fn(&str) + Send + Sync + 'static) -> Arc<Self> {
        let account = Arc::new(Self {
            guest: Arc::downgrade(guest),
            saved: Mutex::new(0),
            loaded: Mutex::new(None),
            tell: Box::new(tell),
        });
        guest.add_device(Arc::clone(&account) as Arc<dyn Device>);
        account
    }

    /// The account that was loaded with the guest.
    pub(super) fn loaded(&self) -> Option<String> {
        self.loaded.lock().clone()
    }
}

/// Steps of a paused guest and the sum of its memory.
pub(super) fn of(guest: &ProcessGuest) -> Result<String, String> {
    Ok(format!("{} {:016x}", guest.progress().total_steps(), sum(&guest.ram())?))
}

/// A sum that depends on every word and its position.
fn sum(ram: &GuestRam) -> Result<u64, String> {
    const PIECE: usize = 256 << 10;
    let (mut sum, mut piece) = (0xcbf2_9ce4_8422_2325_u64, vec![0; PIECE]);
    for block in ram.blocks() {
        let mut at = 0;
        while at < block.len_bytes() {
            let piece = &mut piece[..PIECE.min((block.len_bytes() - at) as usize)];
            block.read(at, piece).map_err(|error| error.to_string())?;
            for word in piece.as_chunks::<8>().0 {
                sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            }
            at += piece.len() as u64;
        }
    }
    Ok(sum)
}

impl Device for Account {
    fn name(&self) -> String {
        "soak/account".into()
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let gone = || VmError::new("the account", "its guest is gone");
        let guest = self.guest.upgrade().ok_or_else(gone)?;
        let of = of(&guest).map_err(|why| VmError::new("the account", why))?;
        let mut saved = self.saved.lock();
        let account = format!("{saved} {of}");
        *saved += 1;
        drop(saved);
        (self.tell)(&account);
        Ok(account.into_bytes())
    }

    fn load(&self, _: u32, body: &[u8]) -> Result<(), VmError> {
        let account = String::from_utf8(body.to_vec()).map_err(|error| VmError::new("the account", error))?;
        *self.loaded.lock() = Some(account);
        Ok(())
    }
}
