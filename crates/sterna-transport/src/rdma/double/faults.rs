//! Faults that are planned ahead.

use crate::rdma::CompletionStatus;

/// When a planned fault happens, counted at its host from the call of [`super::Network::plan`] on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trigger {
    /// In place of the nth registration, from 1 on.
    Registration(u64),
    /// In place of the nth send or write of the host, from 1 on.
    Request(u64),
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The call or the request fails: a registration with this number of the kernel (ENOMEM, EINVAL), a request as if the peer's
    /// adapter had failed.
    Errno(i32),
    /// The request completes with this status; both queue pairs are in the error state then.
    Status(CompletionStatus),
    /// As [`super::Network::kill`].
    Kill,
    /// As [`super::Network::set_link`] with `false`.
    LinkDown,
    /// As [`super::Network::remove_device`].
    RemoveDevice,
}

/// The faults of one host that have not happened yet.
#[derive(Debug, Default)]
pub(super) struct Plan {
    faults: Vec<(Trigger, Fault)>,
}

impl Plan {
    pub(super) fn add(&mut self, trigger: Trigger, fault: Fault) {
        self.faults.push((trigger, fault));
    }

    /// Counts one registration; gives the fault that happens in its place.
    pub(super) fn registration(&mut self) -> Option<Fault> {
        self.count(|trigger| match trigger {
            Trigger::Registration(left) => Some(left),
            Trigger::Request(_) => None,
        })
    }

    /// Counts one request; gives the fault that happens in its place.
    pub(super) fn request(&mut self) -> Option<Fault> {
        self.count(|trigger| match trigger {
            Trigger::Request(left) => Some(left),
            Trigger::Registration(_) => None,
        })
    }

    fn count(&mut self, of_kind: impl Fn(&mut Trigger) -> Option<&mut u64>) -> Option<Fault> {
        let mut due = None;
        for (at, (trigger, _)) in self.faults.iter_mut().enumerate() {
            let Some(left) = of_kind(trigger) else { continue };
            *left = left.saturating_sub(1);
            if *left == 0 && due.is_none() {
                due = Some(at);
            }
        }
        due.map(|at| self.faults.remove(at).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_counts_each_kind_by_itself() {
        let mut plan = Plan::default();
        plan.add(Trigger::Registration(2), Fault::Errno(12));
        plan.add(Trigger::Request(1), Fault::Kill);

        assert_eq!(plan.registration(), None);
        assert_eq!(plan.request(), Some(Fault::Kill));
        assert_eq!(plan.registration(), Some(Fault::Errno(12)));
        assert_eq!((plan.request(), plan.registration()), (None, None));
    }
}
