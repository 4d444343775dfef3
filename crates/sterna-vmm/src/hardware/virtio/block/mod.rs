//! Virtio disks: VIRTIO 1.2, section 5.2.

mod changes;
pub(crate) mod control;
mod copy;
mod disk_session;
mod engine;
mod lock;
mod request;
mod rest;
mod sector;

use std::io;
use std::sync::Arc;

use sterna::{DeviceStream, Hook};
use sterna_disk::{Image, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::backend::{Backend, Session};
use super::space::ConfigurationSpace;
use crate::config::{DiskMigration, DiskOptions};
use crate::error::VmmError;
use changes::Changes;
use control::DiskControl;
use copy::DiskCopy;
use engine::Engine;
use lock::ImageLock;
use sector::MOST_DISCARDED;

const QUEUE_SIZE: u16 = 256;
/// Length limit of a copied disk: 64 TiB, whose change bitmap needs 128 MiB.
const LONGEST_COPIED: u64 = 64 << 40;
/// Highest number of data segments in a request. With header and status they fit into a queue.
const SEGMENTS: u32 = 126;

/// A disk of the guest, in this process.
pub(crate) struct Disk {
    image: Arc<Image>,
    /// The disk's serial number for the guest, such as `sterna-disk-0`.
    id: String,
    queues: u16,
    /// The guest's writes, recorded for the copy.
    changes: Arc<Changes>,
    copy: Option<Arc<DiskCopy>>,
    control: Arc<DiskControl>,
}

/// Opens disk number `index` of the machine. The lock of a shared disk is acquired and released with the
/// guest.
pub(super) fn open(
    index: usize,
    options: &DiskOptions,
    is_incoming: bool,
) -> Result<(Disk, Option<Arc<dyn Hook>>), VmmError> {
    let refuse =
        |why: String| VmmError::Config { what: "disk", why: format!("{}: {why}", options.path.display()) };
    if !(1..=DiskOptions::QUEUES_MAX).contains(&options.queues) {
        let most = DiskOptions::QUEUES_MAX;
        return Err(refuse(format!("{} queues, 1 to {most} are possible", options.queues)));
    }
    if options.is_read_only && options.migration == DiskMigration::Copy {
        return Err(refuse(
            "a disk with migrate=copy cannot be read-only, because the destination writes it".to_owned(),
        ));
    }
    let image = Arc::new(Image::open(&options.image()).map_err(refuse)?);
    if options.migration == DiskMigration::Copy && image.len_bytes() > LONGEST_COPIED {
        let why =
            format!("{} bytes; a disk with migrate=copy has at most {LONGEST_COPIED}", image.len_bytes());
        return Err(refuse(why));
    }
    let is_shared = options.migration == DiskMigration::Shared;
    if !(is_shared && is_incoming) {
        image.lock().map_err(|error| refuse(error.to_string()))?;
    }
    let changes = Arc::new(Changes::new().map_err(|error| refuse(error.to_string()))?);
    let copied = (options.migration == DiskMigration::Copy)
        .then(|| Arc::new(DiskCopy::new(index, Arc::clone(&image), Arc::clone(&changes))));
    let control =
        DiskControl { image: Arc::clone(&image), changes: Arc::clone(&changes), options: options.clone() };
    let disk = Disk {
        image: Arc::clone(&image),
        id: format!("sterna-disk-{index}"),
        queues: options.queues,
        changes,
        copy: copied,
        control: Arc::new(control),
    };
    let hook = is_shared.then(|| Arc::new(ImageLock::new(index, image)) as Arc<dyn Hook>);
    Ok((disk, hook))
}

impl Backend for Disk {
    fn kind(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let always = [VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ];
        let writable = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
        let rest = if self.image.is_read_only() { &[VIRTIO_BLK_F_RO][..] } else { &writable };
        always.iter().chain(rest).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.queues.into()]
    }

    fn configuration(&self) -> Vec<u8> {
        let mut bytes = self.control.capacity().to_vec();
        let words = |bytes: &mut Vec<u8>, words: &[u32]| {
            bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        };
        // size_max, seg_max, geometry, blk_size
        words(&mut bytes, &[0, SEGMENTS, 0, SECTOR as u32]);
        // topology, writeback, unused0
        bytes.extend([0; 10]);
        bytes.extend(self.queues.to_le_bytes());
        // discards: highest number of sectors and pieces, alignment; zeroes: highest number of sectors and
        // pieces, may unmap
        words(&mut bytes, &[MOST_DISCARDED, 1, 8, MOST_DISCARDED, 1]);
        bytes.extend([1, 0, 0, 0]);
        bytes
    }

    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        self.copy.clone().map(|copy| copy as _)
    }

    fn disk(&self) -> Option<Arc<DiskControl>> {
        Some(Arc::clone(&self.control))
    }

    fn begin<'a>(
        &'a mut self,
        _features: u64,
        _space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        Ok(Box::new(disk_session::DiskSession::new(self, Engine::new(&self.image))))
    }
}
