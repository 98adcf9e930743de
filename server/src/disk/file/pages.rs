//! Page-aligned buffers, for data that cannot go straight between host memory and an image.

/// A page of memory.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

const SIZE: usize = size_of::<Page>();

/// A buffer that begins at a page boundary, zeroed.
pub(super) struct Pages {
    pages: Vec<Page>,
    length: usize,
}

impl Pages {
    pub(super) fn new(length: usize) -> Self {
        Self { pages: vec![Page([0; SIZE]); length.div_ceil(SIZE)], length }
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.pages.as_mut_ptr().cast()
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Calls `each` with the parts of a range of the buffer, in order, none over a page's end.
    pub(super) fn visit<E>(
        &mut self,
        start: usize,
        length: usize,
        mut each: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0_usize;
        while done < length {
            let at = start.saturating_add(done);
            let within = at % SIZE;
            let run = SIZE.saturating_sub(within).min(length.saturating_sub(done));
            let Some(bytes) = self
                .pages
                .get_mut(at / SIZE)
                .and_then(|page| page.0.get_mut(within..within.saturating_add(run)))
            else {
                return Ok(());
            };
            each(done, bytes)?;
            done = done.saturating_add(run);
        }
        Ok(())
    }
}
