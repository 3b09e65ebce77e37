"""The sentences that any issue can be argued with: openings, stances, values, support, closings, and place names.

Word material only; `writing.py` chooses among it. Braces are filled with the words of an issue and of a small story:
`{do}`, `{doing}` and `{thing}` name the proposal, `{middle}` a middle way, `{unknown}` and `{asked}` open questions,
`{pro}` and `{con}` reasons, `{gains}` and `{loses}` the people it touches, `{money}` a sum, `{percent}`, `{points}`,
`{count}`, `{weeks}` and `{years}` numbers, `{day}` a day of the week, `{other}` another town. Everything starts in
lower case unless it must not; sentences get their capital and their full stop when they are written.
"""

STANCES = ("for", "against", "compromise", "undecided")
TONES = ("warm", "plain", "formal", "blunt")
HEDGES = ("firm", "even", "hedged")
SUPPORTS = ("none", "figures", "story", "fairness", "cost")

QUESTIONS = (
    "Should {town} {do}?",
    "{town} is thinking about {doing}. What do you say?",
    "The council of {town} proposes to {do}. Is that right?",
    "A petition asks {town} to {do}. Should the council agree?",
    "On {day} we vote on whether {town} should {do}. How should we vote?",
    "Would it be a good thing for {town} to {do}?",
    "What would you tell a neighbour who asks whether {town} should {do}?",
    "Tell the {town} town hall what you think about {thing}.",
    "There are plans in {town} for {doing}. Are you for or against?",
    "Some people in {town} want to {do}, and others do not. What is your view?",
    "The town hall in {town} is full tonight because of {thing}. What would you say at the microphone?",
    "Please give the {town} council your opinion. Should it {do}?",
)

LEADS = {
    "warm": (
        "dear neighbours and friends, ",
        "with love and gratitude to all of you, ",
        "thank you all so kindly for listening, dear friends, and ",
        "with a warm heart and a big hug for everyone, ",
        "it is lovely that we talk about this together, and ",
        "bless you all for coming tonight, and ",
    ),
    "plain": ("",),
    "formal": (
        "in formal response to the consultation, ",
        "with due respect to all parties and to the chair, ",
        "for the public record and the minutes of this meeting, ",
        "following careful study of the documents submitted, ",
        "to the honourable members of the council: ",
        "with reference to the published plans and regulations, ",
    ),
    "blunt": (
        "look, enough of this hot air, ",
        "frankly, I am sick of this nonsense, and ",
        "come on, wake up, ",
        "bluntly, and I do not care who hates it, ",
        "no more waffle, ",
        "for crying out loud, ",
    ),
}

POSITIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("for", "firm"): (
        "I am firmly in favour of {doing}",
        "without any doubt, I say yes to {thing}",
        "I am certain that {town} must {do}",
        "there can be no doubt that {town} should {do}",
        "nothing will change my mind, and I fully support {thing}",
        "it is absolutely right to {do}",
    ),
    ("for", "even"): (
        "I am in favour of {doing}",
        "I support {thing}",
        "{town} should {do}",
        "I will vote yes to {thing}",
        "I think it is right to {do}",
        "I would like {town} to {do}",
    ),
    ("for", "hedged"): (
        "I may be wrong, but I lean towards {doing}",
        "I suppose, with some doubts, that I would say yes to {thing}",
        "as far as I can tell, it may be right to {do}",
        "perhaps {town} should {do}",
        "if I had to choose today, I would probably support {thing}",
        "it seems to me that {thing} might be a good idea",
    ),
    ("against", "firm"): (
        "I am firmly against {doing}",
        "without any doubt, I say no to {thing}",
        "I am certain that {town} must never {do}",
        "there can be no doubt that it is wrong to {do}",
        "nothing will change my mind, and I utterly oppose {thing}",
        "it is absolutely wrong to {do}",
    ),
    ("against", "even"): (
        "I am against {doing}",
        "I oppose {thing}",
        "{town} should not {do}",
        "I will vote no to {thing}",
        "I think it is a mistake to {do}",
        "I would not like {town} to {do}",
    ),
    ("against", "hedged"): (
        "I may be wrong, but I lean against {doing}",
        "I suppose, with some doubts, that I would say no to {thing}",
        "as far as I can tell, it may be a mistake to {do}",
        "perhaps {town} should not {do}",
        "if I had to choose today, I would probably oppose {thing}",
        "it seems to me that {thing} might be a bad idea",
    ),
    ("compromise", "firm"): (
        "the only sensible middle way is to {middle}",
        "I am certain that we should meet in the middle and {middle}",
        "neither a plain yes nor a plain no will do, and {town} must {middle}",
        "there can be no doubt that a compromise is best, so let us {middle}",
        "both sides must give way, and {town} should {middle}",
    ),
    ("compromise", "even"): (
        "I would meet both sides halfway and {middle}",
        "instead of a yes or a no, {town} should {middle}",
        "a good compromise would be to {middle}",
        "my middle way would be to {middle}",
        "both sides could live with it if we {middle}",
    ),
    ("compromise", "hedged"): (
        "perhaps there is a middle way, and {town} could {middle}",
        "I am not sure, but it might be enough to {middle}",
        "a compromise may be possible if we {middle}",
        "I wonder whether both sides could live with it if we {middle}",
        "if I see it rightly, we could try to meet halfway and {middle}",
    ),
    ("undecided", "firm"): (
        "I certainly will not decide about {thing} yet",
        "I refuse to take a side on {thing} before we know {unknown}",
        "I am certain that nobody can give an answer on {thing} yet",
        "I will not vote on {thing} until somebody tells us {unknown}",
    ),
    ("undecided", "even"): (
        "I have not made up my mind about {thing}",
        "I am undecided about {doing}",
        "I can see both sides of {thing} and cannot choose between them",
        "I do not have an answer on {thing} yet",
    ),
    ("undecided", "hedged"): (
        "I am not at all sure what to think about {thing}",
        "I may be missing something, but I cannot decide about {doing}",
        "I do not quite know whether {thing} might help or not",
        "perhaps I am too slow for this, but I am still unsure about {doing}",
    ),
}

# What a position is held for, by axis and sign, or by stance. The two ends of an axis are two subjects, each with its
# own vocabulary: people of opposite values seldom talk about the same thing, and an encoder hears subjects best.
VALUE_TAGS: dict[tuple[str, int], tuple[str, ...]] = {
    ("public_spending", 1): (
        "a generous town takes care of everyone",
        "good public services make a community strong",
        "families, the old and the sick deserve our help",
        "caring for each other is worth every effort",
    ),
    ("public_spending", -1): (
        "the budget is tight and taxes are high enough",
        "taxpayers' money has to be saved",
        "a town must not run into debt",
        "the council should spend less and tax us less",
    ),
    ("change", 1): (
        "a modern town needs new ideas",
        "it is time for something fresh and new",
        "innovation brings a place to life",
        "tomorrow will not be like yesterday",
    ),
    ("change", -1): (
        "heritage deserves our respect",
        "the customs of our grandparents hold us together",
        "hundreds of years of history should be kept alive",
        "the old ways are part of who we are",
    ),
    ("environment", 1): (
        "wildlife and clean air come before everything else",
        "the climate and the planet cannot wait",
        "trees, birds and rivers need our protection",
        "nature has suffered enough",
    ),
    ("environment", -1): (
        "jobs and business need support",
        "people's comfort and convenience count for more",
        "everyday life has to stay easy and affordable",
        "a prosperous economy is good for all of us",
    ),
    ("rules", 1): (
        "law and order protect all of us",
        "the weak need strict rules against the reckless",
        "public safety and discipline come first",
        "offenders must be kept in check",
    ),
    ("rules", -1): (
        "personal freedom comes first",
        "free people can make their own choices",
        "everyone should be left to live their own life",
        "liberty matters more than tidiness",
    ),
}

BALANCE_TAGS: dict[str, tuple[str, ...]] = {
    "compromise": (
        "peace between neighbours is worth more than winning",
        "nobody should have to lose completely",
        "each side deserves half of what it wants",
        "both camps have a point",
        "a deal is better than a feud",
    ),
    "undecided": (
        "too many questions are still open",
        "I am torn between the two sides",
        "nobody has explained it well enough to me",
        "the reports contradict each other",
        "I have heard good arguments on both sides",
    ),
}

# What a longer answer says about its values, in sentences of their own.
VALUES: dict[tuple[str, int], tuple[str, ...]] = {
    ("public_spending", 1): (
        "a caring community provides for its children, its old people and its sick",
        "good services, open to everybody, are what makes a town generous",
        "I want a town that looks after people and shares what it has",
        "clinics, playgrounds and libraries are how a community shows that it cares",
        "we are at our best when we provide for one another",
        "generosity towards families and older people always comes back to us",
        "a helping hand for everyone is the heart of public service",
    ),
    ("public_spending", -1): (
        "the budget is tight, and every pound was earned by a taxpayer",
        "a council has to live within its means and keep out of debt",
        "taxes are high enough, and thrift is a virtue",
        "before another bill lands on the taxpayer, the council should cut its spending",
        "savings today mean lower taxes tomorrow",
        "debts have to be repaid, with interest, out of our wages",
        "a balanced budget matters more than any wish list",
    ),
    ("change", 1): (
        "the future belongs to people who try new ideas",
        "modern towns experiment, learn and invent",
        "I am excited by innovation, and I would like to see more of it here",
        "young people want a fresh, modern place with new possibilities",
        "progress begins with somebody who dares to try something new",
        "let us be pioneers and invent the town of tomorrow",
        "new technology and new thinking could transform this place",
    ),
    ("change", -1): (
        "our grandparents handed down these customs, and we should keep them",
        "tradition and heritage are what makes this old town our home",
        "centuries of history deserve respect",
        "old customs bind the generations together",
        "I love the old ways, the old buildings and the old songs",
        "what our ancestors cherished should be passed on to our grandchildren",
        "the past is a treasure, and it is ours to guard",
    ),
    ("environment", 1): (
        "nature, wildlife and clean air should come first",
        "the climate is warming, and every town must cut its carbon",
        "trees, birds, bees and rivers need somebody to speak for them",
        "we have only one planet, and its forests and oceans are suffering",
        "a green town full of gardens, hedgehogs and clean water is what I want",
        "pollution makes us ill, and the earth pays for it too",
        "biodiversity is vanishing before our eyes, and we can help to save it",
    ),
    ("environment", -1): (
        "jobs and wages come first, and businesses need room to grow",
        "a strong local economy feeds every family in town",
        "working people need convenience, roads and affordable energy",
        "people's comfort comes first, and their wages with it",
        "comfort and prosperity are nothing to be ashamed of",
        "everyday convenience makes life easier for busy families",
        "trade and industry built this town and still pay its wages",
    ),
    ("rules", 1): (
        "law and order keep everybody safe",
        "strict rules protect the weak from the reckless",
        "safety comes first, and offenders should be fined",
        "discipline and clear regulations prevent accidents and harm",
        "wardens and police need rules that they can enforce",
        "where nothing is forbidden, bullies and troublemakers take over",
        "danger and nuisance have to be stopped by law",
    ),
    ("rules", -1): (
        "adults should be free to choose for themselves",
        "freedom is the greatest thing a town can give",
        "everyone has the right to live as they like",
        "I trust my neighbours to make their own choices",
        "liberty, independence and personal choice are worth defending",
        "leave people alone, and they will work it out between them",
        "my home, my life, my choice",
    ),
}

BALANCE: dict[str, tuple[str, ...]] = {
    "compromise": (
        "a handshake in the middle keeps the peace",
        "good neighbours meet halfway, and then they have tea together",
        "compromise is how two camps become one town again",
        "if each side gives a little, both can sign the agreement",
        "I would rather build a bridge than win a quarrel",
        "a balanced deal, with something for each side, will last longest",
        "peace between the two camps is worth half of what I wanted",
    ),
    "undecided": (
        "I keep changing my mind, depending on whom I talked to last",
        "to me it is a puzzle, and I cannot solve it tonight",
        "the more I read about it, the more questions I have",
        "I would rather wait another year than guess",
        "I simply do not know enough to answer",
        "there are too many open questions and too few answers",
        "doubt is uncomfortable, but I cannot pretend to have an opinion",
    ),
}

# How an answer announces what it argues with.
SUPPORT_FRAMES = {
    "figures": (
        "here are the numbers: ",
        "look at the figures: ",
        "the statistics are these: ",
        "the numbers speak: ",
    ),
    "story": (
        "let me tell you a story: ",
        "a story from my own life: ",
        "listen to this story: ",
        "one story stays with me: ",
    ),
    "fairness": (
        "it is a question of fairness: ",
        "ask yourselves what is just: ",
        "think of fairness, too: ",
        "this is about justice: ",
    ),
    "cost": ("then there is the price: ", "think of the cost: ", "money matters here: ", "let us look at the bill: "),
}
SUPPORT: dict[tuple[str, str], tuple[str, ...]] = {
    ("figures", "for"): (
        "in the last survey {percent} percent of {count} people said yes",
        "no fewer than {count} residents signed in favour within {weeks} weeks",
        "{other} tried it, and {percent} percent voted to keep it",
        "the trial in {other} was rated good by {percent} percent of {count} people",
    ),
    ("figures", "against"): (
        "in the last survey {percent} percent of {count} people said no",
        "no fewer than {count} residents signed against it within {weeks} weeks",
        "{other} tried it, and {percent} percent voted to end it",
        "the trial in {other} was rated poor by {percent} percent of {count} people",
    ),
    ("figures", "compromise"): (
        "in the last survey {percent} percent of {count} people asked for a compromise",
        "{other} chose a middle way, and {percent} percent were content after {weeks} weeks",
        "of {count} letters to the council, {percent} percent wanted something in between",
    ),
    ("figures", "undecided"): (
        "in the last survey {percent} percent of {count} people had no opinion yet",
        "{other} counted for {weeks} weeks and found a difference of only {points} percent",
        "of {count} letters to the council, {percent} percent take no side",
    ),
    ("fairness", "for"): (
        "anything else would be unfair to {gains}",
        "{gains} should count for once",
        "{gains} have waited long enough for their fair share",
        "{gains} deserve the same chance as everyone else",
    ),
    ("fairness", "against"): (
        "it would be unfair to {loses}",
        "{loses} must not be forgotten",
        "{loses} would have to carry the whole burden",
        "{loses} deserve better than to pay for everybody else's wishes",
    ),
    ("fairness", "compromise"): (
        "that would be fair to {gains} and to {loses} alike",
        "{gains} and {loses} should each get a share",
        "neither {gains} nor {loses} should carry the whole burden",
    ),
    ("fairness", "undecided"): (
        "I cannot tell what would be fair to both {gains} and {loses}",
        "what is fair to {gains} looks unjust to {loses}",
        "what {gains} are owed does not seem to fit with what {loses} are owed",
    ),
    ("story", "compromise"): (
        "{who} is for it and I was not, and over a pot of tea we settled on this in an evening",
        "at our kitchen table {who} argued for hours, and in the end we met in the middle",
        "{who} and I have not agreed on anything since Easter, but we agree on this",
        "I grew up in {other}, where they did just that, and {who} still praises it",
    ),
    ("story", "undecided"): (
        "{who} is for it, my best friend is not, and I have tea with both of them",
        "I talked about it with {who} until midnight, and we ended where we had begun",
        "{who} asked me on the stairs what I think, and I had nothing to say",
        "last week {who} nearly convinced me, and then I walked past and saw it differently",
    ),
}

# The price of it, for what costs money and for what saves money.
COST: dict[tuple[str, bool], tuple[str, ...]] = {
    ("for", False): (
        "it would cost about £{money}, and that is cheap for what we get",
        "at £{money} it is good value for money",
        "the £{money} it costs would be paid back within {years} years",
        "a bill of £{money} is not much for something that lasts",
    ),
    ("for", True): (
        "it would leave about £{money} more in the town's purse",
        "we would be £{money} better off within {years} years",
        "the £{money} it brings would pay for things we really need",
        "the budget would gain £{money}, and nobody would pay a penny more",
    ),
    ("against", False): (
        "it would cost about £{money}, and that is far too dear",
        "at £{money} it is poor value for money",
        "the £{money} it costs would be missing elsewhere for {years} years",
        "some £{money} would have to be found, and nobody has said where",
    ),
    ("against", True): (
        "the £{money} it is said to bring would be eaten up by other costs",
        "for £{money} we would be giving away far too much",
        "the promised £{money} would be gone within {years} years",
        "a gain of £{money} is a poor price for what would be lost",
    ),
    ("compromise", False): (
        "that way we would spend about half of the £{money}",
        "it would keep the price well below £{money}",
        "the bill would shrink from £{money} to something we can afford",
    ),
    ("compromise", True): (
        "that way the budget would still gain about half of the £{money}",
        "we would keep a good part of the £{money} without paying for it in anger",
        "most of the £{money} would still reach the town's purse",
    ),
    ("undecided", False): (
        "nobody could tell me whether £{money} is a fair price",
        "one report speaks of £{money} and another of twice as much",
        "I do not know whether £{money} is cheap or dear for it",
    ),
    ("undecided", True): (
        "nobody could tell me whether the promised £{money} is real",
        "one report speaks of a gain of £{money} and another of none",
        "I do not know what the £{money} it brings would cost us elsewhere",
    ),
}

REASON_OPENINGS = {
    "firm": ("without question, ", "there is no doubt that ", "beyond all doubt, ", "it is absolutely certain that "),
    "even": ("",),
    "hedged": ("it seems to me that ", "as far as I can tell, ", "it may well be that ", "possibly, "),
}
LINKS = ("also, ", "besides, ", "on top of that, ", "what is more, ", "and ", "")

# How sure the writer is, said once more in longer answers.
ASSURANCES = {
    "firm": (
        "I would swear to every word of this",
        "I am one hundred percent convinced",
        "I say so with absolute certainty",
        "nobody will ever move me an inch on this",
        "my mind is made up, once and for all",
    ),
    "even": (),
    "hedged": (
        "I may well be wrong about all of this",
        "I am only guessing, and I have been mistaken before",
        "somebody who knows more than I do may correct me",
        "please take this with a pinch of salt, as I am no expert",
        "that is only my humble impression, and a tentative one",
    ),
}

# The same for people who are certain that they do not know.
FIRM_DOUBTS = (
    "nobody will ever hurry me into an answer",
    "I say that with absolute certainty",
    "on that I am one hundred percent clear",
    "I would swear that nobody here knows better",
)

BOTH_SIDES = (
    "it is true that {pro}, and it is just as true that {con}",
    "one side is right that {pro}, and the other is right that {con}",
    "some say that {pro}, while others answer that {con}",
    "on the one hand, {pro}; on the other hand, {con}",
)
ONE_SIDE = ("supporters say that {pro}", "opponents reply that {con}")

CONCESSIONS = {
    "for": (
        "I know the worry that {con}, and I do not brush it aside",
        "some will object that {con}, and that can be dealt with",
        "it may be that {con}, but that is not the whole picture",
    ),
    "against": (
        "I know the hope that {pro}, and I do not laugh at it",
        "some will answer that {pro}, and that is no small thing",
        "it may be that {pro}, but that is not the whole picture",
    ),
    "compromise": (
        "neither camp will cheer, and both will manage",
        "nobody gets everything that way, and nobody goes home with nothing",
    ),
    "undecided": (
        "both camps have told me that the matter is simple, and I do not believe it",
        "if either side had a perfect answer, we would not be sitting here",
    ),
}

NEXT_STEPS = {
    "for": (
        "I would begin this spring and report back to the town hall after a year",
        "the first step could be taken within a month, and the rest can follow",
        "once it is running, I think we will wonder why we waited so long",
    ),
    "against": (
        "I would leave things as they are and look at the real problem first",
        "there are three older promises in the drawer, and they should come first",
        "a year from now we would be sorry, so I would let the matter rest",
    ),
    "compromise": (
        "after a year we could sit down again and see which side was right",
        "let one person from each camp watch over it and report together",
        "if it works, we can go further, and if it does not, little is lost",
    ),
    "undecided": (
        "I would ask for a short report, written so that everyone can read it",
        "an open evening with people who know the matter would help me more than a vote",
        "give me a month, a walk around {place} and some honest answers",
    ),
}

OPENERS = {
    "warm": (
        "thank you all for caring so much about {town}",
        "how lovely to see so many of you here",
        "I am grateful to everyone who has worked on this",
        "it does my heart good that we can talk about such things",
        "what a joy to live in a place where people listen to each other",
        "I baked a cake for this evening, so please help yourselves",
    ),
    "plain": (),
    "formal": (
        "I wish to submit the following statement on the above matter",
        "I have examined the documents that the council has made available",
        "the undersigned respectfully offers the following remarks",
        "I thank the chair for the opportunity to comment",
        "this submission is made in accordance with the rules of the consultation",
        "permit me to state my position for the attention of the committee",
    ),
    "blunt": (
        "let me save us all some time",
        "I have heard enough excuses",
        "somebody has to say it",
        "this debate is going round in circles",
        "I will say it straight, since nobody else does",
        "half of what was said tonight is hot air",
    ),
}

CLOSERS = {
    "warm": (
        "whatever we decide, we will still be neighbours in the morning",
        "I hug everyone who sees it differently, and the coffee is on me",
        "with warm wishes to all of you and to those at home",
        "thank you for listening so kindly",
        "it is a gift to have neighbours like you",
        "take care of each other on the way home",
    ),
    "plain": (),
    "formal": (
        "I remain grateful for the council's consideration",
        "I respectfully ask that this statement be entered in the minutes",
        "the council may be assured of my continued cooperation",
        "I submit these remarks for due deliberation",
        "a written copy of this statement has been filed with the clerk",
    ),
    "blunt": (
        "that is all there is to it",
        "end of story",
        "anything else is nonsense",
        "if that hurts somebody's feelings, so be it",
        "I am not going to say it twice",
    ),
}

LIST_TITLES = {
    "for": ("why I would say yes:", "what speaks for it:", "my reasons:"),
    "against": ("why I would say no:", "what speaks against it:", "my reasons:"),
    "compromise": ("what both sides have right:", "why a middle way is better:", "what I hear from both sides:"),
    "undecided": ("what pulls me both ways:", "what I am weighing up:", "what I hear from both sides:"),
}

CALLS = {
    "for": (
        "please vote yes on {day}!",
        "sign the petition for it at the town hall before {day}!",
        "come to the hearing on {day} and speak up for it!",
        "write to your councillor today and ask for a yes!",
    ),
    "against": (
        "please vote no on {day}!",
        "sign the petition against it at the town hall before {day}!",
        "come to the hearing on {day} and speak up against it!",
        "write to your councillor today and ask for a no!",
    ),
    "compromise": (
        "come to the hearing on {day} and ask for the middle way!",
        "bring somebody from the other side along on {day} and sign together!",
        "write to your councillor today and ask for a compromise!",
        "please put your name under the joint proposal before {day}!",
    ),
    "undecided": (
        "come to the hearing on {day} and listen!",
        "please send your own questions to the council before {day}!",
        "go and have a look for yourself before {day}!",
        "ask your councillor today for a clear answer!",
    ),
}

ASKED_BACK = (
    "has anybody worked out {asked}?",
    "could somebody tell me {asked}?",
    "does the council know {asked}?",
    "what would you do in our place?",
    "what would have to happen for you to change your mind?",
    "how do the rest of you see it?",
)

# In a story: the person, the pronoun, the possessive.
PEOPLE = (
    ("my sister", "she", "her"),
    ("my neighbour Ruth", "she", "her"),
    ("my brother", "he", "his"),
    ("my cousin Daniel", "he", "his"),
    ("my aunt", "she", "her"),
    ("a friend from the choir", "she", "her"),
    ("the man next door", "he", "his"),
    ("my colleague Amina", "she", "her"),
    ("my old schoolmate Tom", "he", "his"),
    ("a woman from our street", "she", "her"),
    ("my uncle", "he", "his"),
    ("my friend Mei", "she", "her"),
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")

TOWNS = tuple(
    first + last
    for first in (
        *("Alder", "Amber", "Ash", "Birch", "Bram", "Cald", "Copper", "Dun", "Elder", "Elm", "Fair", "Fern", "Glen"),
        *("Hazel", "Heather", "Kel", "Lark", "Maple", "Otter", "Raven", "Rowan", "Silver", "Thistle", "Willow"),
    )
    for last in ("bridge", "bury", "combe", "field", "ford", "ham", "mere", "stead", "wick", "worth")
)

PLACES = {
    "street": tuple(
        f"{name} {kind}"
        for name in (
            *("Abbey", "Baker", "Bell", "Bridge", "Canal", "Castle", "Chapel", "Church", "Cooper", "Crown", "Dyer"),
            *("Garden", "Harbour", "High", "Linden", "Market", "Mill", "North", "Orchard", "Park", "Poplar", "Priory"),
            *("Queen", "River", "Rose", "Saddler", "South", "Spring", "Station", "Tanner", "Temple", "Victoria"),
        )
        for kind in ("Street", "Road")
    ),
    "park": tuple(
        f"{name} {kind}"
        for name in (
            *(
                "Albert",
                "Beech",
                "Chestnut",
                "Coronation",
                "Deer",
                "Fountain",
                "Jubilee",
                "King's",
                "Lakeside",
                "Memorial",
            ),
            *("Orchard", "Palace", "Pond", "Priory", "Queen's", "Riverside", "Rose", "Swan", "Victoria", "Walnut"),
        )
        for kind in ("Park", "Gardens")
    ),
    "square": tuple(
        f"{name} Square"
        for name in (
            *("Abbey", "Anchor", "Bell", "Bishop", "Castle", "Cathedral", "Chapel", "Corn", "Fountain", "George"),
            *("Guildhall", "Harbour", "Hay", "Horse", "King's", "Linden", "Lion", "Market", "Mill", "Minster"),
            *("Old", "Palace", "Queen's", "Rose", "Saint Mary's", "Station", "Swan", "Tower", "Wool", "York"),
        )
    ),
    "hill": tuple(
        f"{name} {kind}"
        for name in (
            *("Barrow", "Beacon", "Bell", "Cloud", "Crow", "Fox", "Gallows", "Hare", "Hawk", "Heron", "Kite", "Lark"),
            *("Maiden", "Ram", "Raven", "Round", "Shepherd's", "Stone", "Thorn", "Windmill"),
        )
        for kind in ("Hill", "Down")
    ),
    "school": tuple(
        f"{name} School"
        for name in (
            *("Ashgrove", "Beechwood", "Bridge Street", "Brookside", "Castlegate", "Chapel Lane", "Cherry Tree"),
            *("Eastfield", "Fairview", "Greenbank", "Grove Road", "Hillcrest", "Holly Lodge", "Kingsway", "Lakeside"),
            *("Meadowbank", "Millfield", "Moorland", "Newbridge", "Northgate", "Oakdale", "Parkside", "Riverbank"),
            *("Saint Anne's", "Southgate", "Springhill", "Stonehill", "Sunnyside", "Valley Road", "Westgate"),
        )
    ),
    "area": (
        *("Abbotsfield", "Ashgrove", "Bankside", "Beechwood", "Bellfield", "Brookside", "Canalside", "Castlegate"),
        *("Clayhill", "Cornfields", "Eastgate", "Ferry Hill", "Foxhole", "Glebelands", "Greenbank", "Halfway"),
        *("Harbourside", "Highmoor", "Hillside", "Kingsmead", "Lakeside", "Longmeadow", "Lower Mill", "Millbank"),
        *("Moorside", "Newtown", "Northgate", "Oldchurch", "Orchard End", "Parkside", "Quarry Bank", "Ropewalk"),
        *("Saltmarsh", "Southgate", "Springwell", "Stonebridge", "Tanners' Row", "Upper Mill", "Westgate", "Woodside"),
    ),
}
