//! Encodes requests for pages, and decides whether the source accepts requests now.

use sterna_ram::PAGE_SHIFT;
use sterna_wire::return_path::ReturnMessage;

use crate::error::MigrationError;

/// The state of the requests on one main channel.
#[derive(Default)]
pub(crate) struct Asking {
    /// The source accepts requests: from LISTEN on, and in a recovery from RESUME on. Before that, requests are
    /// only noted.
    is_open: bool,
    /// The block of the previous request: the next request for the same block omits the name.
    last: Option<usize>,
}

impl Asking {
    /// Lets requests be sent from now on. The first request names its block.
    pub(crate) fn open(&mut self) {
        *self = Self { is_open: true, last: None };
    }

    /// Whether requests may be sent.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Appends a request for pages of the block `name`.
    pub(crate) fn encode(
        &mut self,
        (block, name): (usize, &str),
        (first, count): (u64, u64),
        out: &mut Vec<u8>,
    ) -> Result<(), MigrationError> {
        let block = match self.last.replace(block) == Some(block) {
            true => None,
            false => Some(name.to_owned()),
        };
        // The cast loses nothing: a request covers one page of the backing memory, which is much smaller than 4
        // GiB.
        let length = (count << PAGE_SHIFT) as u32;
        let message = ReturnMessage::RequestPages { block, start: first << PAGE_SHIFT, length };
        message.encode(out).map_err(MigrationError::wire("return path"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_request_of_each_channel_names_its_block() {
        let mut asking = Asking::default();
        assert!(!asking.is_open());
        let named = |asking: &mut Asking, block| {
            let mut out = Vec::new();
            asking.encode((block, "m0"), (3, 1), &mut out).unwrap();
            match ReturnMessage::decode(&out).unwrap() {
                Some((ReturnMessage::RequestPages { block, start: 12288, length: 4096 }, _)) => {
                    block.is_some()
                }
                other => panic!("{other:?}"),
            }
        };
        asking.open();
        assert!(named(&mut asking, 0) && !named(&mut asking, 0) && named(&mut asking, 1));
        asking.open();
        assert!(named(&mut asking, 1), "another channel");
    }
}
