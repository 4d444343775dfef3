//! Checks every frame of an image.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::image::StoredImage;
use crate::error::StoreError;

/// The result of a check.
#[derive(Debug, Default)]
pub struct Checked {
    /// Frames that were read, of all layers.
    pub frames: u64,
    /// Stored bytes that were read.
    pub bytes: u64,
    /// Damaged frames, by layer and number.
    pub damage: Vec<Damage>,
}

/// A damaged frame.
#[derive(Debug)]
pub struct Damage {
    /// Layer: 0 is the image itself.
    pub layer: usize,
    /// Number of the frame in its layer.
    pub frame: u32,
    /// Offset of the frame in the layer's file, or in its pack.
    pub offset: u64,
    /// What is wrong with it.
    pub error: StoreError,
}

impl StoredImage {
    /// Reads every frame of the image and its bases with `threads` threads, and checks the digests.
    ///
    /// # Errors
    /// An error that is not damage, such as a read that fails.
    pub fn check(&self, threads: usize) -> Result<Checked, StoreError> {
        let mut checked = Checked::default();
        let layers = std::iter::successors(Some(self), |image| image.base().map(|base| &**base));
        for (layer, image) in layers.enumerate() {
            image.check_layer(layer, threads, &mut checked)?;
        }
        Ok(checked)
    }

    fn check_layer(&self, layer: usize, threads: usize, checked: &mut Checked) -> Result<(), StoreError> {
        let next = AtomicU32::new(0);
        let damage = Mutex::new(Vec::new());
        let failed = Mutex::new(None);
        let work = || loop {
            let frame = next.fetch_add(1, Ordering::Relaxed);
            if frame >= self.frames() || failed.lock().is_some() {
                return;
            }
            match self.frame(0, frame) {
                Ok(_) => {}
                Err(error) if error.is_image_at_fault() => {
                    let offset = self.stored_at(frame).0;
                    damage.lock().push(Damage { layer, frame, offset, error });
                }
                Err(error) => *failed.lock() = Some(error),
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If the host refuses a thread, the others do its work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let mut damage = damage.into_inner();
        damage.sort_by_key(|damage| damage.frame);
        checked.damage.append(&mut damage);
        checked.frames += u64::from(self.frames());
        checked.bytes += self.frame_bytes();
        Ok(())
    }
}
