//! The entropy device: VIRTIO 1.2, section 5.4. It gives the guest random bytes from the host.

use std::fs::File;
use std::io::{self, Read};

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::backend::{Backend, Session};
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;
use crate::error::VmmError;

const SOURCE: &str = "/dev/urandom";
/// Highest number of bytes per request. The driver sends another request for more.
const MOST: usize = 4096;

pub(crate) struct Entropy(File);

impl Entropy {
    pub(super) fn new() -> Result<Self, VmmError> {
        let refuse = |error| VmmError::Config { what: "entropy", why: format!("{SOURCE}: {error}") };
        File::open(SOURCE).map(Self).map_err(refuse)
    }
}

impl Backend for Entropy {
    fn kind(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![64]
    }

    fn configuration(&self) -> Vec<u8> {
        Vec::new()
    }

    fn begin<'a>(
        &'a mut self,
        _features: u64,
        _space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        Ok(Box::new(EntropySession(&self.0)))
    }
}

struct EntropySession<'a>(&'a File);

impl<'a> Session<'a> for EntropySession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        rings[queue].answer_all(|chain| {
            let mut bytes = vec![0; chain.writable.len().min(MOST)];
            self.0.read_exact(&mut bytes)?;
            Ok(chain.writable.write(&bytes))
        })
    }
}
