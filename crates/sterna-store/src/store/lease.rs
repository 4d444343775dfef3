//! Leases of saves, and the list of what a garbage collection condemned.
//!
//! A save writes a lease before it looks at anything, and removes it when its image has a name. A collection writes what it
//! will remove before it looks for leases. Therefore one of two things holds: the collection sees the lease, and removes
//! nothing; or the save sees the list, and does not use what is on it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::image_store::ImageStore;
use super::keys::hex;
use crate::error::StoreError;
use crate::objects::Condition;
use crate::unfinished::Unfinished;

/// Prefix of the leases of saves.
pub(super) const LEASES: &str = "leases/save-";
/// Prefix of the lists of collections. Each collection has its own, and removes no other one that is young.
pub(super) const CONDEMNED: &str = "leases/condemned-";
/// Age after which a lease belongs to a save that ended without removing it.
pub(super) const LEASE_LIFE: Duration = Duration::from_secs(24 * 3600);
/// Age after which a save writes its lease again.
const RENEWAL: Duration = Duration::from_secs(3600);
/// Limit of the list in bytes.
const LIST_MOST: u64 = 1 << 30;

/// The lease of one save. Dropping it removes it.
pub(super) struct Lease {
    store: ImageStore,
    key: String,
    written: Mutex<SystemTime>,
    /// Keys that the save must not use.
    pub(super) condemned: HashSet<String>,
    _unfinished: Unfinished,
}

impl Lease {
    /// Takes a lease, and reads what is condemned.
    pub(super) fn take(store: &ImageStore) -> Result<Self, StoreError> {
        let mut id = [0; 16];
        crate::write::random(&mut id, store.name())?;
        let key = format!("{LEASES}{}", hex(&id));
        store.objects.put(&key, b"save\n", Condition::IfAbsent)?;
        let written = Mutex::new(SystemTime::now());
        let (objects, removed) = (Arc::clone(&store.objects), key.clone());
        let unfinished = Unfinished::new(move || drop(objects.delete(&removed)));
        let condemned = HashSet::new();
        let mut lease = Self { store: store.clone(), key, written, condemned, _unfinished: unfinished };
        // The order counts: first the lease, then the list.
        lease.condemned = self::condemned(store)?.into_iter().collect();
        Ok(lease)
    }

    /// Writes the lease again if it is old, so that it does not expire while the save runs.
    pub(super) fn renew(&self) -> Result<(), StoreError> {
        let mut written = self.written.lock();
        if written.elapsed().is_ok_and(|age| age > RENEWAL) {
            self.check()?;
            self.store.objects.put(&self.key, b"save\n", Condition::Always)?;
            *written = SystemTime::now();
        }
        Ok(())
    }

    /// Fails if a collection removed the lease, because it was too old.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        match self.store.objects.get(&self.key, 64) {
            Ok(_) => Ok(()),
            Err(StoreError::Missing { .. }) => {
                Err(StoreError::LeaseLost { name: self.store.name().to_owned() })
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A lease that stays delays garbage collection by a day, and harms nothing else.
        let _ = self.store.objects.delete(&self.key);
    }
}

/// The keys on the lists of all collections.
fn condemned(store: &ImageStore) -> Result<Vec<String>, StoreError> {
    let mut keys = Vec::new();
    for list in store.keys(CONDEMNED)? {
        match store.objects.get(&list, LIST_MOST) {
            Ok((bytes, _)) => keys.extend(String::from_utf8_lossy(&bytes).lines().map(str::to_owned)),
            // That collection has ended.
            Err(StoreError::Missing { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(keys)
}
