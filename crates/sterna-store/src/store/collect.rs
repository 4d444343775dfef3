//! Garbage collection, and what a store contains.

use std::collections::HashSet;
use std::time::SystemTime;

use super::image_store::ImageStore;
use super::keys::{IMAGES, NAMES, PACKS, hex, is_of_store, pack_key};
use super::lease::{CONDEMNED, LEASE_LIFE, LEASES};
use crate::digest::Digest;
use crate::error::StoreError;
use crate::objects::{Condition, Listed};

/// The result of a garbage collection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Images without a name that were removed.
    pub images: u64,
    /// Packs that were removed.
    pub packs: u64,
    /// Bytes of both.
    pub bytes: u64,
    /// Saves that run, so that nothing was removed. Another collection removes it later.
    pub running_saves: u64,
    /// Leases of saves that ended without removing them.
    pub dead_leases: u64,
    /// Uploads that were begun and not completed.
    pub uploads: u64,
}

/// What a store contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreStat {
    /// Number of names.
    pub names: u64,
    /// Number of images, also those without a name.
    pub images: u64,
    /// Bytes of their indexes.
    pub index_bytes: u64,
    /// Number of packs.
    pub packs: u64,
    /// Bytes of all packs.
    pub pack_bytes: u64,
    /// Bytes of the frames of all named images, each image counted alone.
    pub named_bytes: u64,
    /// Saves that run, or ended without removing their lease.
    pub leases: u64,
}

/// The list of what a collection will remove. Dropping it removes it.
struct Condemned<'a> {
    store: &'a ImageStore,
    key: String,
}

impl<'a> Condemned<'a> {
    fn write(store: &'a ImageStore, garbage: &[Listed]) -> Result<Self, StoreError> {
        let mut id = [0; 16];
        crate::write::random(&mut id, store.name())?;
        let key = format!("{CONDEMNED}{}", hex(&id));
        let text = garbage.iter().fold(String::new(), |text, listed| text + &listed.key + "\n");
        store.objects.put(&key, text.as_bytes(), Condition::IfAbsent)?;
        Ok(Self { store, key })
    }

    /// Fails if another collection took this one for dead.
    fn check(&self) -> Result<(), StoreError> {
        match self.store.objects.get(&self.key, u64::MAX) {
            Ok(_) => Ok(()),
            Err(StoreError::Missing { .. }) => {
                Err(StoreError::LeaseLost { name: self.store.name().to_owned() })
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Condemned<'_> {
    fn drop(&mut self) {
        // A list that stays keeps saves from sharing what is on it, and harms nothing else.
        let _ = self.store.objects.delete(&self.key);
    }
}

/// What names lead to.
struct Reached {
    keys: HashSet<String>,
}

impl ImageStore {
    /// Removes images and packs that no name leads to, unless a save runs; and uploads that began a day ago.
    ///
    /// Other objects that are in the storage stay.
    ///
    /// Safe beside saves and beside other collections, and after a crash at any moment: a later collection continues.
    ///
    /// # Errors
    /// [`StoreError::KeyNeeded`] or [`StoreError::WrongKey`] if a named image is encrypted with another key, because its packs
    /// are not known then: nothing is removed. The storage's errors.
    pub fn collect(&self) -> Result<Collected, StoreError> {
        let mut collected = Collected::default();
        // First the list, then the leases: see the module `lease`.
        let reached = self.reached()?;
        let mut garbage: Vec<Listed> = Vec::new();
        for prefix in [IMAGES, PACKS] {
            self.objects.list(prefix, &mut |listed| {
                if is_of_store(&listed.key) && !reached.keys.contains(&listed.key) {
                    garbage.push(listed);
                }
                Ok(())
            })?;
        }
        let list = Condemned::write(self, &garbage)?;
        let now = self.written_at(&list.key)?.unwrap_or_else(SystemTime::now);
        self.look_at_leases(now, &mut collected)?;
        let old = now.checked_sub(LEASE_LIFE).unwrap_or(SystemTime::UNIX_EPOCH);
        collected.uploads = self.objects.abort_uploads(old)?;
        if collected.running_saves > 0 {
            return Ok(collected);
        }
        // A save that ended since the list was made may have used what is on it, before it was there.
        let reached = self.reached()?;
        list.check()?;
        for listed in garbage.iter().filter(|listed| !reached.keys.contains(&listed.key)) {
            self.objects.delete(&listed.key)?;
            match listed.key.starts_with(IMAGES) {
                true => collected.images += 1,
                false => collected.packs += 1,
            }
            collected.bytes += listed.length_bytes;
        }
        Ok(collected)
    }

    /// What the store contains.
    ///
    /// # Errors
    /// The storage's errors.
    pub fn stat(&self) -> Result<StoreStat, StoreError> {
        let mut stat = StoreStat::default();
        for (prefix, is_image) in [(IMAGES, true), (PACKS, false)] {
            self.objects.list(prefix, &mut |listed| {
                let (count, bytes) = match is_image {
                    true => (&mut stat.images, &mut stat.index_bytes),
                    false => (&mut stat.packs, &mut stat.pack_bytes),
                };
                *count += 1;
                *bytes += listed.length_bytes;
                Ok(())
            })?;
        }
        stat.leases = self.keys(LEASES)?.len() as u64;
        for named in self.list()? {
            stat.names += 1;
            if named.is_readable {
                stat.named_bytes += self.open_one(&named.digest, &named.name)?.frame_bytes();
            }
        }
        Ok(stat)
    }

    /// Keys of the images that names lead to, of their bases, and of all their packs.
    fn reached(&self) -> Result<Reached, StoreError> {
        let (mut keys, mut open) = (HashSet::new(), Vec::<Digest>::new());
        for key in self.keys(NAMES)? {
            match self.digest_at(&key) {
                Err(StoreError::Missing { .. }) => {}
                digest => open.push(digest?),
            }
        }
        while let Some(digest) = open.pop() {
            if !keys.insert(format!("{IMAGES}{digest}")) {
                continue;
            }
            let image = match self.open_one(&digest, &digest.to_string()) {
                // A name without an image is damage, which `check` reports. It leads to no pack.
                Err(StoreError::Missing { .. }) => continue,
                image => image?,
            };
            keys.extend(image.index().packs.iter().map(pack_key));
            open.extend(image.named_base().map(|(base, _)| base));
        }
        Ok(Reached { keys })
    }

    /// Counts the saves that run, and removes leases and lists of processes that ended long ago.
    fn look_at_leases(&self, now: SystemTime, collected: &mut Collected) -> Result<(), StoreError> {
        let mut dead = Vec::new();
        let is_dead = |listed: &Listed| now.duration_since(listed.modified).is_ok_and(|age| age > LEASE_LIFE);
        self.objects.list(CONDEMNED, &mut |listed| {
            if is_dead(&listed) {
                dead.push(listed.key);
            }
            Ok(())
        })?;
        self.objects.list(LEASES, &mut |listed| {
            match is_dead(&listed) {
                true => dead.push(listed.key),
                false => collected.running_saves += 1,
            }
            Ok(())
        })?;
        for key in dead {
            // A save that runs after all finds that its lease is gone, and fails.
            self.objects.delete(&key)?;
            collected.dead_leases += 1;
        }
        Ok(())
    }

    fn written_at(&self, key: &str) -> Result<Option<SystemTime>, StoreError> {
        let mut found = None;
        self.objects.list(key, &mut |listed| {
            found = Some(listed.modified);
            Ok(())
        })?;
        Ok(found)
    }
}
